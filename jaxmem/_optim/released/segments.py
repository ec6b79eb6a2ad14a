"""The released step of a loss whose layers are a Python loop: runs the loss's segments, and uses
the gradient of each parameter when the gradient is complete.

A component is the parameters that one layer alone reads, or one other array. The gradient of an
array that several segments read, such as tied embeddings, is the sum of their gradients. It is
complete when the first of these segments has run backward.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem._model.auto.segments import SegmentedLoss
from jaxmem._model.states import layout, room
from jaxmem._model.states.places import DIVIDED, Places
from jaxmem._model.states.shards import shards
from jaxmem._model.states.store import brought, returned
from jaxmem._optim.adama.eight_bits import QuantizedState, is_coded, quantized, recoded_as
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released import placement
from jaxmem._optim.released.accumulated import MOVED, last_apart, microbatches
from jaxmem._optim.released.bound import BoundStep
from jaxmem._optim.released.direct import Update, mixing_error, proved
from jaxmem._optim.released.fold import TALLIES, Accumulation, Fold, entries, squared
from jaxmem._optim.released.form import (
    axis_in,
    check_axis,
    check_has_mesh,
    check_untraced,
    like_in_8_bits,
)
from jaxmem._optim.released.model import metrics_of, one_microbatch, tally_of
from jaxmem._optim.released.placement import places_of
from jaxmem._optim.released.segmented_run import SegmentedRun
from jaxmem._trace.alone import Alone, first_leaves
from jaxmem._trace.arguments import shard_bytes
from jaxmem.errors import OptimizerError

LAYERS = DIVIDED[-1]  # layers are gathered one at a time
States = list[dict[str, Any]]  # of the components, as `Fold` documents them


class SegmentedStep(BoundStep):
    """A training step of a loss in segments. `BoundStep` documents the positional arguments.

    loss: the loss in segments.
    shapes: the tree of the parameters' shapes.
    trained: `shapes` with None in place of frozen parameters.
    label: the label of the placed layers' block in a plan.
    dtype: always None, since the layers compute in the dtypes of the loss.
    """

    dtype = None

    def __init__(self, *common, loss: SegmentedLoss, shapes: Any, trained: Any):
        super().__init__(*common)
        self.loss, self.shapes, self.trained = loss, shapes, trained
        self.label = loss.label

    @property
    def released(self) -> "SegmentedStep":
        """The step itself: its pair is the state."""
        return self

    @property
    def accumulates(self) -> bool:
        """Whether the step accumulates microbatches in AdamA's moments."""
        return isinstance(self.tx, AdamA)

    def count(self, params) -> int:
        """The number of layers whose states have places. Raises OptimizerError for parameters of
        another loss.
        """
        _check_tree("state[0]", params, self.shapes)
        return len(self.loss.placed)

    def arrays(self, state) -> tuple[list, list, list]:
        """Sorts the arrays of a state, as `ReleasedStep.arrays` does."""
        params, placed = jax.tree.leaves(state[0]), self._owned_from(0)
        layers = [params[i] for i in self.numbers if i in placed]
        outside = [params[i] for i in self.numbers if i not in placed]
        moments = zip(jax.tree.leaves(state[1]), self._owners(state[1]))
        return layers, [a for a, i in moments if i in placed], outside

    def _owned_from(self, first: int) -> set[int]:
        """The numbers of the parameters that one of the placed layers alone reads, from the layer
        `first` of them on.
        """
        return {i for layer in self.loss.placed[first:] for i in self.loss.owned[layer]}

    @property
    def numbers(self) -> list[int]:
        """The numbers of the trained parameters, in the order of the optimizer's trees."""
        count = len(jax.tree.leaves(self.shapes))
        return [i for i in range(count) if i not in self.loss.frozen]

    @property
    def components(self) -> list[tuple[int, ...]]:
        """The numbers of the trained parameters of each component: first the layers, then the
        others.
        """
        of_layers = {i for own in self.loss.owned for i in own}
        layers = [tuple(i for i in own if i not in self.loss.frozen) for own in self.loss.owned]
        return [*layers, *((i,) for i in self.numbers if i not in of_layers)]

    @property
    def _places(self) -> dict[int, int]:
        """The place of each trained parameter in the optimizer's trees, by number."""
        return {i: place for place, i in enumerate(self.numbers)}

    def init(self, params) -> tuple[Any, Any]:
        """Makes the first state: the pair of `params` and the optimizer's state.

        Raises OptimizerError for a transformation that does not update each array independently.
        """
        numbers, (leaves, structure) = {*self.numbers}, jax.tree.flatten(params)
        kept = [a if i in numbers else None for i, a in enumerate(leaves)]
        state = self.tx.init(structure.unflatten(kept))
        if isinstance(self.tx, AdamA):
            return params, state
        # A state with the buffer of a parameter could not be donated together with the parameter.
        own = lambda a, follows: jnp.copy(a) if follows else a
        leaves, structure = jax.tree.flatten(state)
        return params, structure.unflatten(map(own, leaves, self._alone.follows))

    def split(self, state, persist: int, *, copies=0, buffers=0, outer_moments=layout.DEVICE):
        check_untraced("split", "state", state)
        places = self._placed("split", persist, copies, buffers, outer_moments)
        leaves, structure = jax.tree.flatten(state)
        pairs = [*zip(leaves, self._memories(state[1], places))]
        device = room.device_of(state)
        far = [a for a, kind in pairs if kind == layout.HOST]
        room.check_pool(device, room.nbytes(far))
        if room.has_host_memory(device):  # a CPU has one memory
            kind_of = lambda a: getattr(a.sharding, "memory_kind", None)
            there = [a for a in far if kind_of(a) == layout.HOST]
            room.check_free(room.nbytes(far) - room.nbytes(there))
        shared = layout.sharing(state)
        moved = [_moved(a, kind, id(a) not in shared) for a, kind in pairs]
        layout.delete_unless_in(moved, shared)
        return structure.unflatten(moved)

    def create(self, params, persist=0, *, mesh=None, divided="nothing", **where):
        check_untraced("create", "params", params)
        check_has_mesh(mesh, divided)
        _check_tree("params", params, self.shapes)
        places = self._placed("create", persist, **where)
        devices = placement.mesh_of_one(()) if mesh is None else mesh
        shapes = self.shapes, self._state_shapes
        specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
        if mesh is not None:
            specs = self.specs(params, mesh.shape[axis_in("create", self.axis_name, mesh)], divided)
        memories = self._memories(shapes[1], places)
        placed = [*zip(jax.tree.leaves(specs), memories)]
        sizes = [
            len(devices.local_devices) * shard_bytes(a, NamedSharding(devices, spec))
            for a, (spec, _) in zip(jax.tree.leaves(shapes), placed)
        ]
        device, far = devices.devices.flat[0], [kind == layout.HOST for kind in memories]
        hosted = sum(size for size, is_far in zip(sizes, far) if is_far)
        room.check_pool(device, hosted)
        room.check_free(hosted if room.has_host_memory(device) else sum(sizes))
        leaves = jax.tree.leaves(params)
        # One array at a time is in device memory as a whole.
        store = lambda a, spec, kind: jax.block_until_ready(
            layout.moved(placement.put(devices, a, spec, layout.DEVICE), kind)
        )
        first = first_leaves(self.tx.init, self.trained)
        own = [leaves[i] for i in self.numbers]
        states = (first(s, own.__getitem__) for s in range(len(memories) - len(leaves)))
        made = [store(a, *where) for a, where in zip(itertools.chain(leaves, states), placed)]
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    def _placed(
        self, method: str, persist: int, copies=0, buffers=0, outer_moments=layout.DEVICE
    ) -> Places:
        """The places of the layers' states. Raises OptimizerError for invalid arguments.

        method: the method that was called.
        """
        if copies or buffers:
            raise OptimizerError(
                f"{method}: `copies` is {copies} and `buffers` is {buffers}; expected 0 for layers"
                " of a Python loop, whose parameters have a copy in no second memory"
            )
        return places_of(len(self.loss.placed), persist, copies, buffers, outer_moments)

    def _memories(self, state, places: Places) -> list[str]:
        """The memory of each leaf of the pair of the parameters and the optimizer's `state`."""
        params = range(len(jax.tree.leaves(self.shapes)))
        streamed, outside = self._owned_from(places.persist), {*params} - self._owned_from(0)
        far = streamed | (outside if places.outer_moments == layout.HOST else set())
        memory = lambda is_far: layout.HOST if is_far else layout.DEVICE
        states = self._owners(state)
        return [*(memory(i in streamed) for i in params), *(memory(i in far) for i in states)]

    def quantized_state(self, state) -> tuple[Any, Any]:
        """Returns a state of this step with its moments in 8 bits, as
        `ReleasedStep.quantized_state` does. Moments are coded one array at a time.
        """
        params, old = state
        tx = self.tx.quantized() if isinstance(self.tx, AdamA) else quantized(self.tx)
        like, kept = like_in_8_bits(tx.init, self.trained, old), layout.sharing(state)
        numbered = itertools.count()
        code = lambda a, b: recoded_as(a, b, next(numbered), False, kept)
        coded = lambda like, tree: jax.tree.map(code, like, tree, is_leaf=is_coded)
        if isinstance(self.tx, AdamA):
            made = old._replace(**{k: coded(getattr(like, k), getattr(old, k)) for k in MOVED})
        else:
            shapes = any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(old))
            count = like.count if shapes else jnp.zeros((), jnp.int32)
            made = QuantizedState(count, coded(like.inner, old))
        layout.delete_unless_in((params, made), kept)
        return params, made

    def joined(self, state):
        return state  # the arrays of layers in a Python loop are whole in any placement

    def opened(self, state):
        return state

    def put(self, state, pair):
        return pair

    def specs(self, params, devices, divided="nothing"):
        if divided not in ("nothing", LAYERS):
            raise OptimizerError(
                f"specs: `divided` is {divided!r}, and the layers of the loss are a Python loop;"
                f" expected 'nothing' or {LAYERS!r}, which gathers a layer at a time"
            )
        if divided == "nothing":
            return jax.tree.map(lambda _: PartitionSpec(), (params, self._state_shapes))
        self._check_divisible()
        specs = shards(params, devices, str(self.axis_name))
        of_leaves, shapes = jax.tree.leaves(specs), jax.tree.leaves(self.shapes)
        state, structure = jax.tree.flatten(self._state_shapes)
        of_state = [
            PartitionSpec() if i is None or a.shape != shapes[i].shape else of_leaves[i]
            for a, i in zip(state, self._owners(self._state_shapes))
        ]
        return specs, structure.unflatten(of_state)

    def _check_divisible(self) -> None:
        """Raises OptimizerError for an optimizer whose update cannot be computed from parts."""
        if isinstance(self.tx, AdamA):
            rule = self.tx.rule
            if (rule.moments, rule.second_moment) != ("float", "squares"):
                raise OptimizerError(
                    f"specs: `divided` is {LAYERS!r}, the layers of the loss are a Python loop, and"
                    f" AdamA has moments={rule.moments!r} and second_moment={rule.second_moment!r};"
                    " expected 'float' and 'squares', or divided='nothing'"
                )
            return
        alone, shapes = self._alone, jax.tree.leaves(self.trained)
        owners = zip(jax.tree.leaves(self._state_shapes), alone.owners)
        others = (i for a, i in owners if i is not None and a.shape not in ((), shapes[i].shape))
        if (mixed := alone.mixed if alone.mixed is not None else next(others, None)) is not None:
            raise mixing_error(alone.names[mixed])

    def run_of_device(self, state, divided):
        self._check(state)
        return lambda state, given: self._minibatch(state, given, divided == LAYERS)

    def run(self, state, given):
        check_axis(self.axis_name)
        self._check(state)
        return self._minibatch(state, given, False)

    def _check(self, state) -> None:
        """Raises OptimizerError unless the state is of this loss and optimizer."""
        for i, like in enumerate((self.shapes, self._state_shapes)):
            _check_tree(f"state[{i}]", state[i], like)

    def _minibatch(self, state, given, divided: bool):
        """Runs a minibatch, on one device or on each of several.

        divided: whether a device may have parts of arrays. It gathers a layer when the layer runs,
          and updates its own parts by the mean gradient.
        """
        minibatch = self._accumulated if isinstance(self.tx, AdamA) else self._direct
        params, old = state
        new, metrics = minibatch(params, old, given, divided)
        return jax.tree.map(lambda a, b: jnp.asarray(a, jnp.result_type(b)), new, state), metrics

    @functools.cached_property
    def _state_shapes(self):
        return jax.eval_shape(self.tx.init, self.trained)

    @functools.cached_property
    def _alone(self) -> Alone:
        return proved(self.tx, self.trained)

    def _owners(self, state) -> Sequence[int | None]:
        """The number of the parameter that each leaf of the optimizer's state belongs to, if the
        leaf moves with the parameter; else None.
        """
        numbered = self.numbers
        if not isinstance(self.tx, AdamA):
            return [None if i is None else numbered[i] for i in self._alone.owners]

        def each(moment):  # the two arrays of a moment in 8 bits belong to one parameter
            number = next(numbers)
            return jax.tree.map(lambda _: number, moment)

        owners = jax.tree.map(lambda _: -1, state)
        for name in MOVED:
            numbers = itertools.count()
            moments = jax.tree.map(each, getattr(state, name), is_leaf=is_coded)
            owners = owners._replace(**{name: moments})
        return [None if i < 0 else numbered[i] for i in jax.tree.leaves(owners)]

    def _tally(self) -> dict[str, Any]:
        return tally_of(jax.tree.leaves(self.trained))()

    def _metrics(self, states: States, losses, apart: bool):
        count = len(self.loss.owned)
        layers = {k: jnp.stack([s[k] for s in states[:count]]) for k in TALLIES}
        return metrics_of((states[count:], [layers]), losses, self.axis_name, apart=apart)

    def _direct(self, params, old, batch, divided: bool):
        """Updates each component by its gradient (LOMO)."""
        alone, leaves = self._alone, jax.tree.leaves(params)
        stored, structure = jax.tree.flatten(old)
        places = self._places
        placed = [[places[i] for i in c] for c in self.components]
        owned = [[s for s, i in enumerate(alone.owners) if i in c] for c in placed]
        shared = {s: brought(stored[s]) for s, i in enumerate(alone.owners) if i is None}
        states = [
            {"params": [leaves[i] for i in c], "optimizer": [stored[s] for s in own]}
            | self._tally()
            for c, own in zip(self.components, owned)
        ]
        updates = [Update(alone, c, own, shared) for c, own in zip(placed, owned)]
        folds = [Fold(use, self.clip, mean_over=self.axis_name) for use in updates]
        states, loss = self._backward(folds, leaves, states, batch, divided)
        _, new = alone.updated({}, {}, shared, {})
        new = {s: returned(a, stored[s]) for s, a in new.items()}
        for own, state in zip(owned, states):
            new |= dict(zip(own, state["optimizer"]))
        made = structure.unflatten([new[s] for s in range(len(stored))])
        new = self._params(states, leaves), made
        return new, self._metrics(states, one_microbatch(loss), apart=False)

    def _accumulated(self, params, old, batch, divided: bool):
        """Folds each microbatch into AdamA's moments, and updates each component when the last
        microbatch is folded into it.
        """
        rule, leaves = self.tx.rule, jax.tree.leaves(params)  # pyright: ignore
        n, mask, places = rule.accumulation_steps, rule.mask_of(self.trained), self._places
        mask = None if mask is None else jax.tree.leaves(mask)
        rule.check_rows(old.moments)
        leaves_of = lambda tree: jax.tree.leaves(tree, is_leaf=is_coded)
        moments = {k: leaves_of(tree) for k, tree in entries(old.moments).items()}
        states = [
            {k: [of[places[i]] for i in c] for k, of in moments.items()} | self._tally()
            for c in self.components
        ]

        def updating(component) -> Callable:
            own = None if mask is None else [mask[places[i]] for i in component]
            masked = dataclasses.replace(rule, mask=own)

            def update(params, new, whole):
                # The update reads the stored moments. If XLA fused the update with the fold, it
                # would compute the moments once more.
                new = jax.lax.optimization_barrier(new)
                if divided:  # the mean gradient over devices was folded
                    return masked.applied(params, new, old.count, whole)
                return masked.applied(params, rule.reduced(new, old.count), old.count)

            return update

        # The numbers of microbatches continue from device to device.
        first = 0 if rule.axis_name is None else jax.lax.axis_index(rule.axis_name) * n
        decayed = (dataclasses.replace(rule, axis_name=None) if divided else rule).decays
        mean_over = rule.axis_name if divided else None

        def folds(i, *, last: bool) -> list[Fold]:
            b1, b2 = (jnp.where(i == first, b, 1.0) for b in decayed)
            update = updating if last else lambda component: None
            use = lambda c: Accumulation(
                rule, old.count, (b1, b2), update(c), mean_over, stacked=True, number=i
            )
            return [Fold(use(c), self.clip, mean_over=mean_over) for c in self.components]

        def one(states, indexed):
            i, part = indexed
            return self._backward(folds(i, last=False), leaves, states, part, divided)

        numbered = first + jnp.arange(n, dtype=jnp.int32), microbatches(batch, n)

        def updating_one(states, indexed):
            i, part = indexed
            # Parameters that the loop replaces are read from its carry: otherwise XLA would copy
            # all that are in host memory.
            own = jax.tree.leaves(self._params(states, leaves))
            return self._backward(folds(i, last=True), own, states, part, divided)

        def with_params(states):
            pairs = zip(states, self.components)
            return [s | {"params": [leaves[i] for i in c]} for s, c in pairs]

        states, losses = last_apart(one, updating_one, with_params, states, numbered)
        made = {k: self._joined(states, k) for k in moments}
        made |= {"count": optax.safe_increment(old.count), "folded": jnp.zeros_like(old.folded)}
        new = self._params(states, leaves), old._replace(**made)
        return new, self._metrics(states, losses, apart=not divided)

    def _found(self, states: States, name: str) -> dict[int, Any]:
        """The entries `name` of the components' states, by the numbers of the parameters."""
        pairs = zip(self.components, states)
        return {i: a for c, state in pairs for i, a in zip(c, state[name])}

    def _joined(self, states: States, name: str):
        """The entries `name` of the components' states, in the tree of trained parameters."""
        found = self._found(states, name)
        return jax.tree.structure(self.trained).unflatten([found[i] for i in sorted(found)])

    def _params(self, states: States, leaves: Sequence):
        """The new parameters, in the user's tree. `leaves` are the old ones."""
        found = self._found(states, "params")
        new = [found.get(i, a) for i, a in enumerate(leaves)]
        return jax.tree.structure(self.shapes).unflatten(new)

    def _backward(self, folds: Sequence[Fold], leaves, states: States, batch, divided: bool):
        """Runs one microbatch, and uses each gradient when it is complete. Returns the new states
        of the components, and the loss with its auxiliary values.
        """
        whole = jax.tree.leaves(self.shapes) if divided else None
        arguments = self.components, leaves, self.leaves(batch), whole, self.axis_name
        run = SegmentedRun(self.loss, *arguments)
        seed = jnp.ones_like(run.value)
        if self.clip.how == "norm":
            parts = lambda c: folds[c].use.like(states[c])
            square = lambda c, state, g: squared(g, parts(c), folds[c].mean_over)
            squares = run.backward(seed, [{}] * len(states), square)
            squares = [s for s, c in zip(squares, self.components) if c]
            finite = [jnp.where(jnp.isfinite(s), s, jnp.zeros((), s.dtype)) for s in squares]
            factor = self.clip.factor(sum(finite[1:], finite[0]))
            folds = [dataclasses.replace(f, factor=factor) for f in folds]
            # The second backward waits for the factor: otherwise XLA would find that the passes
            # compute equal gradients, and store all of them.
            seed, _ = jax.lax.optimization_barrier((seed, factor))
        used = run.backward(seed, states, lambda c, state, g: folds[c](state, g))
        return used, (run.value, run.reported)


def _moved(a, kind: str, alone: bool):
    """Moves an array to the memory `kind`, and deletes the old array if it is `alone`."""
    new = layout.moved(a, kind)
    if alone and new is not a and isinstance(a, jax.Array):
        jax.block_until_ready(new)
        if a.sharding.memory_kind != kind:
            a.delete()
    return new


def _check_tree(name: str, tree, like) -> None:
    """Raises OptimizerError unless a tree has the structure and the shapes of `like`."""
    shapes = lambda tree: [(*jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves(tree)]
    if jax.tree.structure(tree) != jax.tree.structure(like):
        got, want = jax.tree.structure(tree), jax.tree.structure(like)
    elif shapes(tree) != shapes(like):
        pairs = zip(jax.tree.leaves_with_path(tree), shapes(tree), shapes(like))
        path, got, want = next((p, a, b) for (p, _), a, b in pairs if a != b)
        name += jax.tree_util.keystr(path)
    else:
        return
    raise OptimizerError(
        f"released_step: `{name}` is {got}; expected {want}, as `init` makes for this loss"
    )
