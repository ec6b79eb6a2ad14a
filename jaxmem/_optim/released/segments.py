"""The released step of a loss whose layers are a Python loop: runs the loss's segments, and uses
the gradient of each parameter when the gradient is complete.

A component is the parameters that one layer alone reads, or one other array. The gradient of an
array that several segments read, such as tied embeddings, is the sum of their gradients. It is
complete when the first of these segments has run backward.

A segment saves tensors as a layer of a stack does (`_model/loop/layer.py`): parameters, and casts
and views of parameters, are read again in the backward. So the parameters of a layer in host memory
are on the device in the layer's forward and in its backward. A barrier lets a fetch begin when the
segment before begins: otherwise XLA could fetch all layers first.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmem._model.auto.segments import SegmentedLoss
from jaxmem._model.loop.layer import Residuals, forward
from jaxmem._model.loop.pullback import pulled
from jaxmem._model.states import layout, room
from jaxmem._model.states.store import brought, returned, streams
from jaxmem._optim.adama.eight_bits import is_coded
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released.accumulated import MOVED, microbatches, stacked_values
from jaxmem._optim.released.bound import BoundStep
from jaxmem._optim.released.direct import Update, proved
from jaxmem._optim.released.fold import TALLIES, Accumulation, Clip, Fold, entries, squared
from jaxmem._optim.released.form import check_axis, check_untraced
from jaxmem._optim.released.model import metrics_of, one_microbatch, tally_of
from jaxmem._optim.released.placement import places_of
from jaxmem._trace.alone import Alone
from jaxmem._trace.vary import zeros
from jaxmem.errors import OptimizerError

States = list[dict[str, Any]]  # of the components, as `Fold` documents them


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentedStep(BoundStep):
    """A training step of a loss in segments. `BoundStep` documents the other fields.

    clip: how gradients are clipped.
    leaves: `leaves(microbatch)` returns the arrays that the loss reads.
    loss: the loss in segments.
    shapes: the tree of the parameters' shapes.
    trained: `shapes` with None in place of frozen parameters.
    """

    tx: optax.GradientTransformation
    clip: Clip
    axis_name: str | None
    given: Callable[..., tuple]
    leaves: Callable[[Any], list]
    named: Callable[[dict[str, Any]], dict[str, Any]]
    loss: SegmentedLoss
    shapes: Any
    trained: Any

    @property
    def released(self) -> "SegmentedStep":
        """The step itself: its pair is the state."""
        return self

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
        of_layers = {i for owned in self.loss.owned for i in owned}
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
        places = places_of(len(self.loss.owned), persist, copies, buffers, outer_moments)
        if copies or buffers:
            raise OptimizerError(
                f"split: `copies` is {copies} and `buffers` is {buffers}; expected 0 for layers of"
                " a Python loop, whose parameters have a copy in no second memory"
            )
        streamed = {i for owned in self.loss.owned[places.persist :] for i in owned}
        of_layers = {i for owned in self.loss.owned for i in owned}

        def memory(owner: int | None, is_parameter: bool) -> str:
            outside = not is_parameter and outer_moments == layout.HOST
            is_far = owner in streamed or (outside and owner is not None and owner not in of_layers)
            return layout.HOST if is_far else layout.DEVICE

        leaves, structure = jax.tree.flatten(state[0])
        params = [memory(i, True) for i in range(len(leaves))]
        old, of_state = jax.tree.flatten(state[1])
        states = [memory(i, False) for i in self._owners(state[1])]
        pairs = [*zip(leaves, params), *zip(old, states)]
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
        return structure.unflatten(moved[: len(leaves)]), of_state.unflatten(moved[len(leaves) :])

    def create(self, params, persist=0, *, mesh=None, divided="nothing", **where):
        raise OptimizerError(
            "create: the layers of the loss are a Python loop; expected layers in a jax.lax.scan"
            " over stacked parameters, or the first state by `init`, which is made as a whole"
        )

    def joined(self, state):
        return state  # the arrays of layers in a Python loop are whole in any placement

    def opened(self, state):
        return state

    def put(self, state, pair):
        return pair

    def specs(self, params, devices, divided="nothing"):
        if divided != "nothing":
            raise OptimizerError(
                f"specs: `divided` is {divided!r}, and the layers of the loss are a Python loop;"
                " expected 'nothing', or layers in a jax.lax.scan over stacked parameters, whose"
                " states devices divide"
            )
        return jax.tree.map(lambda _: PartitionSpec(), (params, self._state_shapes))

    def run_of_device(self, state, divided):
        return self.run

    def run(self, state, given):
        params, old = state
        check_axis(self.axis_name)
        for name, tree, like in (("0", params, self.shapes), ("1", old, self._state_shapes)):
            _check(f"state[{name}]", tree, like)
        minibatch = self._accumulated if isinstance(self.tx, AdamA) else self._direct
        new, metrics = minibatch(params, old, given)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), new, state), metrics

    @property
    def _state_shapes(self):
        return jax.eval_shape(self.tx.init, self.trained)

    @property
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

    def _metrics(self, states: States, losses):
        count = len(self.loss.owned)
        layers = {k: jnp.stack([s[k] for s in states[:count]]) for k in TALLIES}
        # AdamA folds the device's own gradients, a transformation takes the mean over devices.
        apart = isinstance(self.tx, AdamA)
        return metrics_of((states[count:], [layers]), losses, self.axis_name, apart=apart)

    def _direct(self, params, old, batch):
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
        states, loss = self._backward(folds, leaves, states, batch)
        _, new = alone.updated({}, {}, shared, {})
        new = {s: returned(a, stored[s]) for s, a in new.items()}
        for own, state in zip(owned, states):
            new |= dict(zip(own, state["optimizer"]))
        made = structure.unflatten([new[s] for s in range(len(stored))])
        new = self._params(states, leaves), made
        return new, self._metrics(states, one_microbatch(loss))

    def _accumulated(self, params, old, batch):
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
                new = rule.reduced(jax.lax.optimization_barrier(new), old.count)
                return masked.applied(params, new, old.count)

            return update

        # The numbers of microbatches continue from device to device.
        first = 0 if rule.axis_name is None else jax.lax.axis_index(rule.axis_name) * n
        decayed = rule.decays

        def folds(i, *, last: bool) -> list[Fold]:
            b1, b2 = (jnp.where(i == first, b, 1.0) for b in decayed)
            update = updating if last else lambda component: None
            use = lambda c: Accumulation(
                rule, old.count, (b1, b2), update(c), stacked=True, number=i
            )
            return [Fold(use(c), self.clip) for c in self.components]

        def one(states, indexed):
            i, part = indexed
            return self._backward(folds(i, last=False), leaves, states, part)

        numbered = first + jnp.arange(n, dtype=jnp.int32), microbatches(batch, n)
        before, final = (jax.tree.map(lambda a, s=s: a[s], numbered) for s in (slice(-1), -1))
        losses = None
        if n > 1:
            states, losses = jax.lax.scan(one, states, before)
        with_params = zip(states, self.components)
        states = [s | {"params": [leaves[i] for i in c]} for s, c in with_params]
        states, loss = self._backward(folds(final[0], last=True), leaves, states, final[1])
        losses = stacked_values([loss], losses)
        made = {k: self._joined(states, k) for k in moments}
        made |= {"count": optax.safe_increment(old.count), "folded": jnp.zeros_like(old.folded)}
        new = self._params(states, leaves), old._replace(**made)
        return new, self._metrics(states, losses)

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

    def _backward(self, folds: Sequence[Fold], leaves, states: States, batch):
        """Runs one microbatch, and uses each gradient when it is complete. Returns the new states
        of the components, and the loss with its auxiliary values.
        """
        run = _Run(self.loss, self.components, leaves, self.leaves(batch))
        seed = jnp.ones_like(run.value)
        if self.clip.how == "norm":
            like = lambda c: folds[c].use.like(states[c])
            square = lambda c, state, g: squared(g, like(c), folds[c].mean_over)
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


class _Run:
    """A forward through the segments of a loss, and the backwards that read its saved tensors.

    value: the loss.
    reported: the arrays that the loss returns after the loss itself.
    """

    def __init__(self, loss: SegmentedLoss, components, leaves: list, arguments: Sequence):
        """Runs the forward.

        components: the numbers of the parameters of each component.
        leaves: the parameters, in the memories where they are stored.
        arguments: the other arrays that the loss reads.
        """
        self.segments, self.components, self.leaves = loss.segments, components, leaves
        self.output, self.frozen = loss.output, loss.frozen
        first = {i: k for k, s in reversed([*enumerate(loss.segments)]) for i in s.leaves}
        # The components whose gradients are complete when a segment has run backward. The gradient
        # of a parameter that no segment reads is zero.
        self.complete: list[list[int]] = [[] for _ in loss.segments]
        for c, numbers in enumerate(components):
            if numbers:
                self.complete[min(first.get(i, 0) for i in numbers)].append(c)
        self.saved: list[tuple[list, Residuals, list]] = []
        values = dict(zip(loss.inputs, arguments))
        self.made: list[dict[int, Any]] = []
        own = self._fetched(0, ())
        for k, segment in enumerate(self.segments):
            values |= segment.rest(own, values)
            taken, others = ([values[v] for v in vs] for vs in (segment.takes, segment.others))
            following = self._fetched(k + 1, taken)
            trained, still = self._apart(own)

            def call(own, x, _, segment=segment, names=(*trained, *still)):
                arrays = [*own[0], *own[1]]
                known = dict(zip(names, arrays))
                leaves = [known[i] for i in segment.leaves]
                return segment.call(leaves, x, arrays[len(names) :])

            given = [*trained.values()], [*still.values(), *others]
            made, saved, residuals = forward(call, given, taken, ((), ()), len(still))
            values |= dict(zip(segment.makes, made))
            self.saved.append((saved, residuals, others))
            self.made.append({v: jax.typeof(a) for v, a in zip(segment.makes, made)})
            own = following
        self.value = values[self.output]
        self.reported = loss.reported(leaves, values)

    def backward(self, seed, states: list[dict], use: Callable) -> list:
        """Runs the segments backward. Returns the results of `use` for the components.

        seed: the cotangent of the loss.
        states: the states of the components.
        use: `use(c, state, gradient)` uses the gradient of component c, whose state is in device
          memory.
        """
        used: list[Any] = [*states]
        cotangents, gradients = {self.output: seed}, {}
        last = len(self.segments) - 1
        ready = self._ready(last, states, (seed,))
        for k in range(last, -1, -1):
            segment, (own, near) = self.segments[k], ready
            made = self.made[k]
            given = [
                zeros(a) if v not in cotangents else cotangents.pop(v) for v, a in made.items()
            ]
            ready = self._ready(k - 1, states, given)
            saved, residuals, others = self.saved[k]
            trained, still = self._apart(own)
            read = [*trained.values(), *still.values(), *others]
            pull = residuals.closure(read, saved, residuals.shared([]))
            # The pullbacks of layers are not read: their zeros are small.
            back = pulled if segment.layer is None else lambda pull, given: pull(given)
            d_own, d_taken, _ = back(pull, given)
            for into, names, found in (
                (gradients, trained, d_own),
                (cotangents, segment.takes, d_taken),
            ):
                for name, d in zip(names, found):
                    into[name] = into[name] + d if name in into else d
            now = {}
            for c, state in near.items():
                numbers = self.components[c]
                gradient = [gradients.pop(i) if i in gradients else self._zeros(i) for i in numbers]
                gradient = jax.lax.optimization_barrier(gradient)
                params = [own[i] if i in own else self.leaves[i] for i in numbers]
                replaced = {"params": params} if "params" in states[c] else {}
                now[c] = use(c, state | replaced, gradient)
            # The barrier makes the next segment wait: these gradients are free before it runs.
            waits = jax.lax.optimization_barrier((cotangents, gradients, now))
            cotangents, gradients, now = waits
            for c, new in now.items():
                used[c] = returned(new, states[c]) if states[c] else new
        return used

    def _apart(self, own: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """The trained and the frozen parameters of a segment, by number."""
        of = lambda frozen: {i: a for i, a in own.items() if (i in self.frozen) == frozen}
        return of(False), of(True)

    def _fetched(self, k: int, after) -> dict[int, Any]:
        """The parameters of segment k in device memory, by number. Parameters in host memory are
        copied when the arrays `after` exist.
        """
        numbers = self.segments[k].leaves if 0 <= k < len(self.segments) else ()
        return dict(zip(numbers, _brought([self.leaves[i] for i in numbers], after)))

    def _ready(self, k: int, states: list[dict], after) -> tuple[dict, dict]:
        """The arrays that the backward of segment k needs in device memory: its parameters, by
        number, and the states of the components that it completes, without parameters.
        """
        complete = self.complete[k] if k >= 0 else []
        near = {c: {n: a for n, a in states[c].items() if n != "params"} for c in complete}
        return self._fetched(k, after), _brought(near, after)

    def _zeros(self, i: int):
        return zeros(jax.typeof(brought(self.leaves[i])))


def _brought(tree, after):
    """Copies arrays in host memory to the device when the arrays `after` exist."""
    if not streams(tree):
        return tree
    tree, _ = jax.lax.optimization_barrier((tree, after))
    return brought(tree)


def _moved(a, kind: str, alone: bool):
    """Moves an array to the memory `kind`, and deletes the old array if it is `alone`."""
    new = layout.moved(a, kind)
    if alone and new is not a and isinstance(a, jax.Array):
        jax.block_until_ready(new)
        if a.sharding.memory_kind != kind:
            a.delete()
    return new


def _check(name: str, tree, like) -> None:
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
