"""An optax transformation that updates each array independently of the others, as the optimizer of
a released step: each layer's gradient updates the layer as soon as the gradient exists (LOMO).

Whether arrays are independent is read from the trace of an update, and a part of that trace is run
for each layer. So the proof and the update are one program.

The transformation is traced for a model with one layer in place of all layers. It sees the arrays
of a layer as `block` does, never the stack. In that trace each array of the state has an owner: a
parameter, or none. So the state is the tree that `tx.init` makes, with the arrays of the layers
stacked. A counter occurs in the state once. In the layers' loop, a counter would be stored at an
index, and the fetches would wait for that index.

A pair of states, one of the layers and one of the rest, was the first choice. Masks and
hyperparameters of the whole model would have had to be given twice.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmem._core.lists import merged, separated
from jaxmem._model.states import layout
from jaxmem._model.states.layout import is_stacks, joined_shapes, length, masters_of, parts_of
from jaxmem._model.states.layout import like as as_layers
from jaxmem._model.states.store import brought, returned
from jaxmem._optim.adama.eight_bits import QuantizedState, is_coded, quantized, recoded_as
from jaxmem._optim.released.backward import backward
from jaxmem._optim.released.fold import Clip, Fold
from jaxmem._optim.released.form import check_stacks
from jaxmem._optim.released.gather import of_layers, whole_layer, whole_outside
from jaxmem._optim.released.model import Model, metrics_of, one_microbatch
from jaxmem._trace.alone import Alone
from jaxmem._trace.settings import settings
from jaxmem._trace.vary import varying
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class Components:
    """The parameters, and the leaves of a transformation's state, of each component: one layer, or
    one array outside the layers.

    alone: the transformation, traced for a model with one layer.
    outside: a pair for each array outside the layers: the number of the array, in a list, and the
      numbers of the state's leaves that belong to the array.
    layer: a pair of the numbers of a layer's arrays and of the state's leaves that belong to them.
    """

    alone: Alone
    outside: list[tuple[list[int], list[int]]]
    layer: tuple[list[int], list[int]]

    @staticmethod
    def of(tx: optax.GradientTransformation, model: Model, one) -> "Components":
        """Traces `tx` for parameters of the shapes `one`, with one layer. Raises OptimizerError if
        `tx` cannot update one component at a time.
        """
        if len(jax.tree.leaves(one)) == 1:  # a second array shows whether `tx` couples arrays
            proved(tx, jax.tree.map(lambda a: [a, a], one))  # a prefix: masks still fit
        alone = proved(tx, one)
        owned = lambda chosen: [s for s, owner in enumerate(alone.owners) if owner in chosen]
        is_layers = of_layers(model.layers, one)
        layer = [i for i, within in enumerate(is_layers) if within]
        outside = [([i], owned([i])) for i, within in enumerate(is_layers) if not within]
        return Components(alone, outside, (layer, owned(layer)))

    @property
    def stacked(self) -> list[bool]:
        """For each leaf of the state, whether it belongs to the layers, and has an axis of
        layers.
        """
        return [s in self.layer[1] for s in range(len(self.alone.owners))]

    def leaves(self, state) -> list:
        """Returns the state's leaves. A `Stacks` of an array is one leaf."""
        leaves = jax.tree.leaves(state, is_leaf=is_stacks)
        if len(leaves) != len(self.alone.owners):
            raise OptimizerError(
                f"released_step: the optimizer's state has {len(leaves)} arrays, and `tx` makes"
                f" {len(self.alone.owners)}; expected what `init` or `create` made for this `tx`"
            )
        return leaves

    def tree(self, leaves):
        """The inverse of `leaves`."""
        return jax.tree.unflatten(self.alone.structure, leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """Updates a component. The component's state has the entries "params" and "optimizer", a list
    of the leaves of the optimizer's state that belong to the parameters. Both are replaced if the
    gradient is finite.

    alone: the transformation.
    parameters, owned: the numbers of the component's parameters and leaves, as in `Components`.
    shared: the leaves of the optimizer's state that belong to no parameter, by number.
    """

    alone: Alone
    parameters: list[int]
    owned: list[int]
    shared: dict[int, Any]

    def like(self, state):
        return state["params"]

    def __call__(self, state, gradient):
        by_number = lambda tree: dict(zip(self.parameters, jax.tree.leaves(tree), strict=True))
        old = by_number(state["params"]), dict(zip(self.owned, state["optimizer"], strict=True))
        new = self.alone.updated(by_number(gradient.arrays), *old, self.shared)
        params, states = jax.tree.map(lambda a, b: jnp.where(gradient.finite, a, b), new, old)
        tree = jax.tree.unflatten(jax.tree.structure(state["params"]), list(params.values()))
        return {"params": tree, "optimizer": list(states.values())}


@dataclasses.dataclass(frozen=True, eq=False)
class Direct:
    """The optimizer of a released step that takes a batch as one microbatch.

    tx: the transformation.
    axis_name: the mesh axis over whose devices gradients are averaged; None on one device.
    """

    tx: optax.GradientTransformation
    axis_name: str | None
    _known: dict[Any, Components] = dataclasses.field(default_factory=dict, init=False)

    def quantized(self) -> "Direct":
        return Direct(quantized(self.tx), self.axis_name)

    def _components(self, model: Model, one) -> Components:
        """`Components.of`, which traces `tx` once for parameters of these shapes: a step asks for
        them several times.
        """
        shapes, structure = jax.tree.flatten(one)
        key = model.layers, structure, tuple(shapes), settings()
        if key not in self._known:
            self._known[key] = Components.of(self.tx, model, one)
        return self._known[key]

    def coded(
        self, model: Model, params, like: QuantizedState, state, kept: Collection[int]
    ) -> QuantizedState:
        of = self._components(model, model.one_layer(params))
        leaves, structure = jax.tree.flatten(like.inner, is_leaf=is_coded)
        found = zip(leaves, of.leaves(state), range(len(leaves)), of.stacked, strict=True)
        made = structure.unflatten([recoded_as(*one, kept) for one in found])
        shapes = any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(state))
        return QuantizedState(like.count if shapes else jnp.zeros((), jnp.int32), made)

    def init(self, model: Model, params):
        """Returns the first state, made for all layers at once."""
        of = self._components(model, model.one_layer(params))
        start = lambda layer: jax.tree.leaves(self.tx.init({**params, model.layers: layer}))
        axes = [0 if stacked else None for stacked in of.stacked]
        stacks = masters_of(params[model.layers])
        made = zip(*(jax.vmap(start, out_axes=axes)(stack) for stack in stacks))
        together = lambda parts, stacked: (
            as_layers(params[model.layers], parts) if stacked else parts[0]
        )
        # A state with the buffer of a parameter could not be donated together with the parameter.
        own = lambda a, follows: jax.tree.map(jnp.copy, a) if follows else a
        leaves = map(together, made, of.stacked)
        return of.tree(list(map(own, leaves, of.alone.follows)))

    def created(self, model: Model, outer, layer: Callable, count: int, stacked: Callable, specs):
        shape = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        one = jax.eval_shape(layer, jax.ShapeDtypeStruct((), jnp.int32))
        shapes = {**jax.tree.map(shape, outer), model.layers: one}
        of = self._components(model, shapes)
        # An array of the state depends on one component: the other components may be zeros.
        zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        start = lambda **known: jax.tree.leaves(self.tx.init(zeros() | known))
        of_layers = lambda i: separated(start(**{model.layers: layer(i)}), of.stacked)[0]
        of_others = lambda outer: separated(start(**outer), of.stacked)[1]
        numbers = [s for s, is_stacked in enumerate(of.stacked) if is_stacked]
        # An array that does not depend on the parameters is equal for all parameters, such as
        # zeros.
        first = jax.jit(lambda: separated(start(), of.stacked)[0])()
        spec_of = jax.tree.leaves(specs)

        def made(n, s):
            zero = not of.alone.follows[s] and not bool(jnp.any(first[n]))
            make = None if zero else lambda i: of_layers(i)[n]
            return _numbers_near(stacked(first[n], spec_of[s], make))

        stacks = [made(n, s) for n, s in enumerate(numbers)]
        # Not under `jit`, which would store zeros that depend on no argument on one device.
        own = lambda a, s: jnp.copy(a) if of.alone.follows[s] else a
        others = [s for s, is_stacked in enumerate(of.stacked) if not is_stacked]
        others = [layout.moved(own(a, s), layout.DEVICE) for a, s in zip(of_others(outer), others)]
        return of.tree(merged((stacks, others), of.stacked))

    def opened(self, model: Model, params, state):
        of = self._components(model, model.one_layer(params))

        def closed(stacked, others, near):
            return of.tree(merged((map(_numbers_near, stacked), others), of.stacked))

        stacks, others = separated(of.leaves(state), of.stacked)
        paths = jax.tree.leaves_with_path(of.tree([*map(int, of.stacked)]))
        names = [f"state[1]{jax.tree_util.keystr(path)}" for path, stacked in paths if stacked]
        return dict(zip(names, stacks, strict=True)), others, (), closed

    def check(self, model: Model, params, state) -> None:
        check_stacks(model, params)
        one = model.one_layer(params)
        of = self._components(model, one)
        made = of.leaves(state)
        if jax.tree.structure(state, is_leaf=is_stacks) != of.alone.structure:
            raise OptimizerError(
                f"released_step: the optimizer's state is {jax.tree.structure(state)}; expected"
                f" {of.alone.structure}, which `init` or `create` makes for this `tx`"
            )
        count, want = model.count(params), jax.tree.leaves(jax.eval_shape(self.tx.init, one))
        paths = jax.tree.leaves_with_path(of.tree([*range(len(made))]))
        for (path, s), a, b in zip(paths, made, want):
            shape = joined_shapes(a).shape if of.stacked[s] else jnp.shape(a)
            expected = (count, *b.shape) if of.stacked[s] else b.shape
            if shape != expected:
                raise OptimizerError(
                    f"released_step: `state[1]{jax.tree_util.keystr(path)}` has shape {shape};"
                    f" expected {expected}, that of the state of these parameters:"
                    " step.init(params)"
                )

    def specs(self, model: Model, params, parts, divided: str):
        """Returns the PartitionSpecs of the state.

        parts: the PartitionSpecs of divided parameters.

        Raises OptimizerError for `divided` "moments", and for an update that cannot be computed
        from parts of arrays.
        """
        if divided == "moments":
            raise OptimizerError(
                "specs: `divided` is 'moments' beside an optax transformation; expected 'nothing',"
                " or 'states' or 'layers', where each device updates the parameters whose states it"
                " has"
            )
        one = model.one_layer(params)
        alone = self._components(model, one).alone
        found = [PartitionSpec() for _ in alone.owners]
        if divided == "nothing":
            return jax.tree.unflatten(alone.structure, found)
        if alone.mixed is not None:
            raise mixing_error(alone.names[alone.mixed])
        layers = masters_of(parts[model.layers])[0]
        spec_of = jax.tree.leaves({**parts, model.layers: layers})
        shapes, states = jax.tree.leaves(one), jax.eval_shape(self.tx.init, one)
        for s, (a, owner) in enumerate(zip(jax.tree.leaves(states), alone.owners)):
            if owner is not None and a.ndim:
                if a.shape != shapes[owner].shape:
                    raise mixing_error(alone.names[owner])
                found[s] = spec_of[owner]
        return jax.tree.unflatten(alone.structure, found)

    def minibatch(
        self, model: Model, clip: Clip, like, state, batch, key, by_layer: bool = False
    ) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Returns the state after one batch, and the step's metrics.

        like: the parameters with their whole shapes. If a device has parts of the arrays of `state`
          (ZeRO-3), it gathers a layer when the loop comes to the layer, and updates its own part.
        by_layer: not used: layers are always gathered one at a time.
        """
        params, old = state
        axis, tally, layers = self.axis_name, model.tally(params), params[model.layers]
        of = self._components(model, model.one_layer(params))
        leaves = of.leaves(old)
        shared = {s: brought(leaves[s]) for s, owner in enumerate(of.alone.owners) if owner is None}
        both = lambda params, optimizer: {"params": params, "optimizer": optimizer}
        outer = [
            both(a, [leaves[s] for s in owned]) | tally()
            for a, (_, owned) in zip(jax.tree.leaves(model.outer(params)), of.outside)
        ]
        stacks = [
            both(stack, [parts_of(leaves[s])[k] for s in of.layer[1]]) | tally(length(stack))
            for k, stack in enumerate(parts_of(layers))
        ]

        def fold(component) -> Fold:
            parameters, owned = component
            return Fold(Update(of.alone, parameters, owned, shared), clip, mean_over=axis)

        folds = list(map(fold, [*of.outside, of.layer]))
        # The gathered arrays are typed as varying over devices, so that JAX does not sum their
        # gradients over devices.
        gathered = varying(whole_outside(model, params, like, axis), axis)
        gather = whole_layer(model, like, axis)
        whole = lambda layer: varying(gather(layer), axis)
        if key is not None:
            key = jax.random.fold_in(key, 0 if axis is None else jax.lax.axis_index(axis))
        states, loss, _ = backward(model, folds, gathered, (outer, stacks), batch, key, whole)

        outer, stacks = states
        _, new = of.alone.updated({}, {}, shared, {})
        new = {s: returned(a, leaves[s]) for s, a in new.items()}
        for c, (_, owned) in zip(outer, of.outside):
            new |= dict(zip(owned, c["optimizer"]))
        for n, s in enumerate(of.layer[1]):
            new[s] = as_layers(layers, [c["optimizer"][n] for c in stacks])
        made = of.tree([new[s] for s in range(len(leaves))])
        new = model.joined(params, states, "params"), made
        return new, metrics_of(states, one_microbatch(loss), axis, apart=False)


def mixing_error(name: str) -> OptimizerError:
    """Returns the error for an update that mixes values of a divided array."""
    return OptimizerError(
        f"specs: states are divided, and the update of a value of `{name}` needs others of the"
        " same array, of which a device has a part; expected 'nothing', or a `tx` that takes each"
        " value for itself, such as optax.adamw or optax.lion"
    )


def _numbers_near(stacked):
    """Moves each stacked array of scalars, one scalar for each layer, to device memory. Otherwise
    each layer would copy its scalar from host memory, which takes longer than the saved bytes are
    worth.
    """
    near = lambda a: layout.moved(a, layout.DEVICE) if a.ndim == 1 else a
    return jax.tree.map(near, stacked)


def proved(tx: optax.GradientTransformation, one) -> Alone:
    """Traces `tx`. Raises OptimizerError unless `tx` updates each array independently."""

    def update(gradients, params, state):
        updates, new = tx.update(gradients, state, params)
        as_stored = lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype)
        return optax.apply_updates(params, updates), jax.tree.map(as_stored, new, state)

    try:
        alone = Alone.of(tx.init, update, one)
    except Exception as error:
        raise OptimizerError(
            "released_step: `tx` cannot be called with a gradient, its state and the parameters:"
            f" {type(error).__name__}: {error}; expected a transformation that fits the parameters'"
            " tree, of which a layer's arrays have no axis of layers, and that needs no `value` or"
            " `value_fn`, which a step that updates in its backward does not have"
        ) from error
    if alone.draws:
        raise OptimizerError(
            "released_step: `tx` draws random numbers, which would be the same in every layer;"
            " expected a transformation that draws none"
        )
    if alone.coupled is not None:
        first, second = (alone.names[i] for i in alone.coupled)
        raise OptimizerError(
            f"released_step: `tx` updates `{first}` and `{second}` by each other's gradients (or"
            " may, in a conditional); expected an update in which every array stands alone, since"
            " each layer's gradient is let go as it appears: clip=('norm', c) is the exact global"
            " norm, jaxmem.adama gathers microbatches, and gradients that are not finite are left"
            " out anyway"
        )
    return alone
