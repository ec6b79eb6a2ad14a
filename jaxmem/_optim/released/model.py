"""A model as three functions, the order of its states, and the protocol of optimizers of a released
step.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxmem._model.loop.stack import with_frozen
from jaxmem._model.states.layout import joined_shapes, length, like, masters_of, one_layer, parts_of
from jaxmem._model.tags.operations import wide
from jaxmem._optim.adama.eight_bits import is_coded
from jaxmem._optim.released.fold import TALLIES, Clip
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model as embed, layers and head; the fields are the arguments of `released_step`.

    embed, block, head: the three functions.
    layers: the key of the layers' stacked parameters in the dict of all parameters. All other
      parameters are called `outer`.
    plan, label, dtype, has_aux: as for `jaxmem.stack`.
    reports: whether `head` returns a pair of the loss and a tree of values, which become
      `metrics["aux"]`.
    frozen: for each stack of the layers, a tree of stacked arrays that are read and not trained.
      `block` then receives the pair of a layer's parameters and its frozen arrays. None means that
      all parameters are trained.
    whole_frozen: gathers a layer's frozen arrays, if a device has parts of the arrays.
    """

    embed: Callable
    block: Callable
    head: Callable
    layers: str
    plan: Any
    label: str
    dtype: Any
    has_aux: bool
    reports: bool = False
    frozen: Sequence | None = None
    whole_frozen: Callable[[Any], Any] = lambda layer: layer

    def with_frozen(self, stacks: Sequence) -> Sequence:
        """Returns the pairs of each stack and the frozen arrays of its layers; the stacks alone if
        all parameters are trained.
        """
        return with_frozen(stacks, self.frozen)

    def trained(self, layer):
        """Returns a layer's trained part: the inverse of `with_frozen`."""
        return layer if self.frozen is None else layer[0]

    def check(self, params) -> None:
        """Raises OptimizerError unless `params` is a dict of floating-point arrays with an entry
        for the layers.
        """
        if not isinstance(params, dict) or self.layers not in params:
            is_dict = isinstance(params, dict)
            got = (
                f"has {', '.join(map(repr, params))}" if is_dict else f"is {type(params).__name__}"
            )
            raise OptimizerError(
                f"released_step: `params` {got}; expected a dict with {self.layers!r}, the layers'"
                " parameters stacked (name another key with layers=...): a model that is no stack"
                " of layers takes jaxmem.adama as a transformation"
            )
        for path, a in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(a), jnp.inexact):
                raise OptimizerError(
                    f"released_step: `params{jax.tree_util.keystr(path)}` is {jnp.result_type(a)};"
                    " expected floating-point arrays, which gradients are folded for"
                )

    def count(self, params) -> int:
        """Returns the number of layers. Raises OptimizerError as `check` does."""
        self.check(params)
        return sum(map(length, parts_of(params[self.layers])))

    def masters(self, params) -> list:
        """Returns the updated arrays, without the layers' copies, in the order of the moments."""
        return jax.tree.leaves(
            {k: masters_of(v) if k == self.layers else v for k, v in params.items()}
        )

    def outer(self, params) -> dict:
        """Returns the parameters outside the layers. `params` may be any dict with their keys."""
        return {k: v for k, v in params.items() if k != self.layers}

    def started(self, params, moments: dict[str, Any]):
        """Returns the states of the components at the start of a minibatch.

        The result is a pair of lists: a dict for each array outside the layers, and a dict for each
        stack of layers, whose entries have a leading axis of layers. Each dict is a state of
        `Fold`, with moments and with tallies at 0.

        moments: by name, dicts like the parameters, with as many stacks of layers.
        """
        stacks, tally = parts_of(params[self.layers]), self.tally(params)
        leaves = lambda tree: jax.tree.leaves(self.outer(tree), is_leaf=is_coded)
        outer = zip(*map(leaves, moments.values()))
        layers = zip(*(parts_of(tree[self.layers]) for tree in moments.values()))
        named = lambda values: dict(zip(moments, values, strict=True))
        return (
            [named(values) | tally() for values in outer],
            [named(values) | tally(length(s)) for s, values in zip(stacks, layers)],
        )

    def parted(self, params, rows):
        """Splits the layers' arrays of `rows`, a dict like the parameters, into the stacks of
        `params`. Small arrays are stored as one array of all layers, which no placement of states
        divides.
        """
        layers = params[self.layers]
        ends = [0, *itertools.accumulate(map(length, parts_of(layers)))]
        cut = lambda start, stop: jax.tree.map(lambda a: a[start:stop], rows[self.layers])
        return {**rows, self.layers: like(layers, itertools.starmap(cut, itertools.pairwise(ends)))}

    def united(self, rows):
        """The inverse of `parted`."""
        parts = parts_of(rows[self.layers])
        return {**rows, self.layers: jax.tree.map(lambda *a: jnp.concatenate(a), *parts)}

    def tally(self, params) -> Callable[..., dict[str, Any]]:
        """Returns a function of a shape that makes the tallies of a component, at 0."""
        return tally_of(jax.tree.leaves(parts_of(params[self.layers])))

    def one_layer(self, params):
        """Returns the shapes of the parameters of a model with one layer."""
        shape = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        layer = one_layer(joined_shapes(params[self.layers]))
        return {**jax.tree.map(shape, self.outer(params)), self.layers: layer}

    def joined(self, params, moments, name: str):
        """Returns the entries `name` of the components' states, arranged like `params`: the inverse
        of `started`.
        """
        outer, layers = moments
        whole = jax.tree.unflatten(jax.tree.structure(self.outer(params)), [c[name] for c in outer])
        stacks = like(params[self.layers], [m[name] for m in layers])
        return {k: stacks if k == self.layers else whole[k] for k in params}


def tally_of(leaves: Sequence) -> Callable[..., dict[str, Any]]:
    """Returns a function of a shape that makes the tallies of a component, at 0.

    leaves: the parameters whose gradients the tallies count.
    """
    # For complex parameters, the dtype of their parts: squared norms are real.
    parts = [jnp.finfo(wide(jnp.result_type(a))).dtype for a in leaves]
    widest = max(parts, key=lambda dtype: dtype.itemsize)
    return lambda *shape: {name: jnp.zeros(shape, widest) for name in TALLIES}


def one_microbatch(loss):
    """Returns the result of a batch that is one microbatch, as `metrics_of` takes it."""
    return (loss[0][None], loss[1]) if isinstance(loss, tuple) else loss[None]


def metrics_of(
    components: tuple[list, list], results, axis_name: str | None, *, apart: bool
) -> dict[str, Any]:
    """Returns the metrics of a minibatch, as `ReleasedStep` documents them.

    components: the states of the components with their tallies, as `backward` returns them.
    results: one loss for each microbatch; or a pair of the losses and the auxiliary values,
      each with one entry for each microbatch.
    axis_name: the mesh axis of data parallelism; None on one device.
    apart: whether the tallies of a device count the device's own gradients, and not the mean
      gradients of all devices.
    """
    losses, *aux = results if isinstance(results, tuple) else (results,)
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
        **({"aux": aux[0]} if aux else {}),
    }


class Optimizer(Protocol):
    """The optimizer of a released step: `Accumulated`, which is AdamA, or `Direct`."""

    @property
    def axis_name(self) -> str | None:
        """The mesh axis of data parallelism; None on one device."""
        ...

    def init(self, model: Model, params) -> Any:
        """Returns the first state."""
        ...

    def created(
        self, model: Model, outer, layer: Callable, count: int, stacked: Callable, specs
    ) -> Any:
        """Returns the first state of a model whose layers are made one at a time, each in its
        memory.

        outer: the parameters outside the layers.
        layer: `layer(i)` returns the parameters of layer i.
        count: number of layers.
        stacked: `stacked(one, specs, make)` makes stacks in their memories. `one` has the shapes of
          a layer, `specs` the PartitionSpecs of the stacks, and `make(i)` returns layer i; `make`
          is None for zeros.
        specs: the PartitionSpecs of the state.
        """
        ...

    def quantized(self) -> "Optimizer":
        """Returns the optimizer with its moments in 8 bits. Raises OptimizerError for AdamA whose
        first moment has a dtype of its own.
        """
        ...

    def coded(self, model: Model, params, like, state, kept: Collection[int]) -> Any:
        """Returns a joined state as a state of `quantized()`. Arrays remain in their memories, and
        the originals of coded arrays are deleted.

        like: the shapes of the first state of `quantized()`.
        kept: the ids of arrays that are not deleted.
        """
        ...

    def check(self, model: Model, params, state) -> None:
        """Raises OptimizerError unless `state` belongs to these parameters, in any split."""
        ...

    def opened(self, model: Model, params, state) -> tuple[dict[str, Any], Any, Any, Callable]:
        """Divides the state into three parts. Returns the stacks of layers by name; a tree of the
        arrays outside the layers; a tree of the arrays that are always stored in device memory; and
        the inverse, a function of the three parts. The inverse takes the stacks as a list.
        """
        ...

    def specs(self, model: Model, params, parts, divided: str) -> Any:
        """Returns the PartitionSpecs of the state. `parts` has the PartitionSpecs of divided
        parameters.
        """
        ...

    def minibatch(
        self, model: Model, clip: Clip, like, state, batch, key, by_layer: bool = False
    ) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Runs a minibatch. Returns the new pair (params, state), and the metrics.

        like: the parameters with their whole shapes.
        state: the pair (params, state). A device may have parts of its arrays.
        by_layer: whether divided layers are gathered one at a time, even if all states are stored
          in device memory.
        """
        ...
