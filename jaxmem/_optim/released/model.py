"""A model as three functions, its states in the order in which gradients are used, and what a
released step asks of an optimizer for it.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxmem._model.states.layout import joined_shapes, length, like, masters_of, one_layer, parts_of
from jaxmem._optim.released.fold import TALLIES, Clip
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model as embed, layers and head; the fields are the arguments of `released_step`.

    embed, block, head: the three functions.
    layers: the key of the layers' stacked parameters in the dict of all parameters. All others are
      called the outer ones.
    plan, label, dtype, has_aux: what `jaxmem.stack` is given.
    """

    embed: Callable
    block: Callable
    head: Callable
    layers: str
    plan: Any
    label: str
    dtype: Any
    has_aux: bool

    def check(self, params) -> None:
        """Raises OptimizerError unless `params` has stacked layers and something else, of
        floating-point arrays.
        """
        if not isinstance(params, dict) or self.layers not in params:
            is_dict = isinstance(params, dict)
            got = (
                f"has {', '.join(map(repr, params))}" if is_dict else f"is {type(params).__name__}"
            )
            raise OptimizerError(
                f"released_step: `params` {got}; expected a dict with {self.layers!r}, the layers'"
                " parameters stacked (name"
                " another key with layers=...): a model that is no stack of layers takes"
                " jaxmem.adama as a transformation"
            )
        for path, a in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(a), jnp.inexact):
                raise OptimizerError(
                    f"released_step: `params{jax.tree_util.keystr(path)}` is {jnp.result_type(a)};"
                    " expected floating-point"
                    " arrays, which gradients are folded for"
                )

    def count(self, params) -> int:
        """How many layers `params` has. Raises what `check` does."""
        self.check(params)
        return sum(map(length, parts_of(params[self.layers])))

    def masters(self, params) -> list:
        """The arrays that are updated, without the layers' copies, in the order of the moments'."""
        return jax.tree.leaves(
            {k: masters_of(v) if k == self.layers else v for k, v in params.items()}
        )

    def outer(self, params) -> dict:
        """The parameters, or a dict like them, without the layers'."""
        return {k: v for k, v in params.items() if k != self.layers}

    def started(self, params, moments: dict[str, Any]):
        """Arranges moments as a minibatch folds them, with their tallies at 0.

        moments: by name, dicts like the parameters, whose layers are in as many stacks.

        Returns a list with a dict for each array outside the layers, and one with a dict for each
        stack of layers, whose entries have a leading axis of layers. Each dict is a state of
        `Fold`: a tally of squared norms, and one of gradients that were skipped, stand beside the
        moments.
        """
        stacks, tally = parts_of(params[self.layers]), self.tally(params)
        outer = zip(*(jax.tree.leaves(self.outer(tree)) for tree in moments.values()))
        layers = zip(*(parts_of(tree[self.layers]) for tree in moments.values()))
        named = lambda values: dict(zip(moments, values, strict=True))
        return (
            [named(values) | tally() for values in outer],
            [named(values) | tally(length(s)) for s, values in zip(stacks, layers)],
        )

    def parted(self, params, rows):
        """A dict like the parameters with its layers' arrays, which are of all layers, in as many
        stacks as those of `params`. What is small lies so: one array of all layers, which no
        placement of states divides.
        """
        layers = params[self.layers]
        ends = [0, *itertools.accumulate(map(length, parts_of(layers)))]
        cut = lambda start, stop: jax.tree.map(lambda a: a[start:stop], rows[self.layers])
        return {**rows, self.layers: like(layers, itertools.starmap(cut, itertools.pairwise(ends)))}

    def united(self, rows):
        """Undoes `parted`."""
        parts = parts_of(rows[self.layers])
        return {**rows, self.layers: jax.tree.map(lambda *a: jnp.concatenate(a), *parts)}

    def tally(self, params) -> Callable[..., dict[str, Any]]:
        """A function of a shape that makes tallies of a component's squared norms and of its
        gradients that were skipped, at 0.
        """
        leaves = jax.tree.leaves(parts_of(params[self.layers]))
        # Of complex parameters the dtype of their parts, as squared norms are real.
        wide = jnp.finfo(jnp.promote_types(jnp.float32, jnp.result_type(*leaves))).dtype
        return lambda *shape: {name: jnp.zeros(shape, wide) for name in TALLIES}

    def one_layer(self, params):
        """The shapes of a model with one layer in the place of all."""
        shape = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        layer = one_layer(joined_shapes(params[self.layers]))
        return {**jax.tree.map(shape, self.outer(params)), self.layers: layer}

    def joined(self, params, moments, name: str):
        """Undoes `started` for what has this name: a dict like `params`."""
        outer, layers = moments
        whole = jax.tree.unflatten(jax.tree.structure(self.outer(params)), [c[name] for c in outer])
        stacks = like(params[self.layers], [m[name] for m in layers])
        return {k: stacks if k == self.layers else whole[k] for k in params}


def metrics_of(
    components: tuple[list, list], losses: jax.Array, axis_name: str | None, *, apart: bool
) -> dict[str, Any]:
    """Returns the metrics of a minibatch, as `ReleasedStep` documents them.

    components: the states of the components with their tallies, as `backward` returns them.
    losses: one loss for each microbatch.
    axis_name: the mesh axis of data parallelism; None on one device.
    apart: whether the tallies of a device count the device's own gradients, and not the mean
      gradients of all devices.
    """
    outer, stacks = components
    # One entry for each layer, of all stacks in order.
    layers = {k: jnp.concatenate([m[k] for m in stacks]) for k in TALLIES}
    # Squared norms are summed over components and microbatches. The sum divided by the number of
    # microbatches is the mean of the microbatches' squared norms.
    squares = sum((c["squares"] for c in outer), layers["squares"].sum()) / losses.shape[0]
    counts = sum((c["skipped"] for c in outer), layers["skipped"].sum()), layers["skipped"]
    loss = losses.mean()
    if axis_name is not None:
        # If a component's gradient is a mean over devices, all devices skip it together.
        counts = jax.lax.psum(counts, axis_name) if apart else counts
        loss, squares = jax.lax.pmean((loss, squares), axis_name)
    return {
        "loss": loss,
        "grad_norm": jnp.sqrt(squares),
        "skipped": counts[0].astype(jnp.int32),
        "skipped_layers": counts[1].astype(jnp.int32),
    }


class Optimizer(Protocol):
    """What a released step asks of an optimizer: `Accumulated`, which is AdamA, or `Direct`."""

    @property
    def axis_name(self) -> str | None:
        """The mesh axis of data parallelism; None on one device."""
        ...

    def init(self, model: Model, params) -> Any:
        """The first state."""
        ...

    def created(
        self, model: Model, outer, layer: Callable, count: int, stacked: Callable, specs
    ) -> Any:
        """The first state of a model whose layers are made one at a time in their places.

        outer: the parameters outside the layers.
        layer: makes those of a layer of a number.
        count: how many layers there are.
        stacked: makes stacks in their places, of a layer's shapes, of the stacks' PartitionSpecs,
          and of a function of a layer's number that makes it, or None for zeros.
        specs: the PartitionSpecs of the state.
        """
        ...

    def check(self, model: Model, params, state) -> None:
        """Raises OptimizerError unless `state` is one of these parameters, in any split."""
        ...

    def opened(self, model: Model, params, state) -> tuple[dict[str, Any], Any, Any, Callable]:
        """The state's stacks by name; the arrays outside the layers, as a tree; what lies in device
        memory wherever these lie, as a tree; and a function that puts the three together again, of
        the stacks their values, as a list.
        """
        ...

    def specs(self, model: Model, params, parts, divided: str) -> Any:
        """The PartitionSpecs of the state. `parts`: those of parameters that are divided."""
        ...

    def minibatch(
        self, model: Model, clip: Clip, like, state, batch, key, by_layer: bool = False
    ) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Runs a minibatch. Returns the new pair (params, state), and the metrics.

        like: the parameters with their whole shapes.
        state: the pair (params, state), of whose arrays a device may have a part.
        by_layer: whether layers of which devices have parts are gathered one at a time, also where
          no state lies in host memory.
        """
        ...
