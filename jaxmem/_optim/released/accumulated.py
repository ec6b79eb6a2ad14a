"""AdamA as the optimizer of a released step: runs a minibatch's microbatches one after the other,
and updates the parameters at their end.

If the layers' states are stored in host memory, whole or in part, the step streams: it updates each
layer's parameters in the backward of the last microbatch.

A streamed step separates its last microbatch from the others, and updates each layer as it is
folded. So a layer's states are copied to the device once and back once in that backward (ProTrain
§3). The alternative is a pass over the layers after the minibatch, which would copy parameters and
moments once more. A resident step keeps its one loop, and updates whole stacks at the end. Both
steps round alike, since XLA does not know that the decays of the last microbatch are 1, and since
the arrays outside the layers are updated in one call.

The last microbatch runs in a loop of one iteration, and XLA cannot know that there is only one
(`_once`). If XLA inlined the loop, the last microbatch would be part of the same program as the
others. The stacks that it saves into begin as zeros, which wait for no other value: XLA made the
zeros before the first microbatch, or in one kernel with the zeros of the other microbatches, and
held both. A barrier over all values that the last microbatch reads was tried, and changed nothing.

Barriers stand where a loop of one iteration would end. XLA inlines such a loop, and fuses
operations that a longer loop separates: the fold of a stack of one layer with the update of that
layer. On a CPU, LLVM then contracts other products into fused multiply-adds. So a streamed step has
a barrier between the moments and the update. A resident step has a barrier for stacks of one layer
alone, which costs models of several layers nothing. The update then reads the stored moments.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey

from jaxmem._model.loop.loops import fetched_first
from jaxmem._model.states import layout
from jaxmem._model.states.layout import joined_shapes, masters_of, one_layer, parts_of, read_of
from jaxmem._model.states.layout import like as as_layers
from jaxmem._model.states.store import brought, streams
from jaxmem._optim.adama.eight_bits import is_coded, recoded_as, shapes
from jaxmem._optim.adama.rule import Moments, Rule
from jaxmem._optim.adama.transform import AdamA, AdamAState, RowState, State
from jaxmem._optim.released.backward import backward
from jaxmem._optim.released.fold import Accumulation, Clip, Fold, entries
from jaxmem._optim.released.form import check_shapes
from jaxmem._optim.released.gather import of_layers, updated, whole, whole_layer, whole_outside
from jaxmem._optim.released.model import Model, metrics_of
from jaxmem._trace.vary import varying
from jaxmem.errors import OptimizerError

MOVED = "mu", "nu"  # the entries of a state that placements move


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulated:
    """The optimizer of a released step that folds microbatches into moments. `model.Optimizer`
    documents the methods.

    tx: the transformation.
    """

    tx: AdamA

    @property
    def axis_name(self) -> str | None:
        return self.tx.rule.axis_name

    def quantized(self) -> "Accumulated":
        return Accumulated(self.tx.quantized())

    def coded(self, model: Model, params, like, state: State, kept: Collection[int]) -> State:
        number = itertools.count()

        def one(path, shape, a):
            return recoded_as(shape, a, next(number), path[0] == DictKey(model.layers), kept)

        code = lambda like, tree: jax.tree.map_with_path(one, like, tree, is_leaf=is_coded)
        return state._replace(**{k: code(getattr(like, k), getattr(state, k)) for k in MOVED})

    def init(self, model: Model, params):
        """Returns the first state. The rows of all layers are in one array, whatever the
        placement.
        """
        state: Any = self.tx.init(params)
        if self.tx.rule.moments == "int8":
            # Moments are coded layer by layer: a parameter with one scalar for each layer keeps its
            # moments in its dtype.
            start = jax.vmap(lambda layer: self.tx.rule.start(layer))
            parts = [start(part) for part in masters_of(params[model.layers])]
            coded = {
                k: as_layers(params[model.layers], [getattr(p, k) for p in parts]) for k in MOVED
            }
            state = state._replace(
                **{k: {**getattr(state, k), model.layers: tree} for k, tree in coded.items()}
            )
        if isinstance(state, AdamAState):
            return state
        # A stack of scalars has a row for each layer, as all other stacks have.
        is_number = jax.tree.map(lambda a: jnp.ndim(a) == 1, params[model.layers])
        each = lambda rows, is_number, a: jnp.zeros(a.shape, rows.dtype) if is_number else rows

        def rows(tree):
            layers = jax.tree.map(each, tree[model.layers], is_number, params[model.layers])
            return {**tree, model.layers: layers}

        return state._replace(square=rows(state.square), sketch=rows(state.sketch))

    def created(
        self, model: Model, outer, layer: Callable, count: int, stacked: Callable, specs
    ) -> State:
        stacks = lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype)
        one = jax.eval_shape(layer, jax.ShapeDtypeStruct((), jnp.int32))
        first = jax.tree.map(lambda a: layout.moved(a, layout.DEVICE), self.tx.init(outer))
        shapes = {**outer, model.layers: jax.tree.map(stacks, one)}
        like = jax.eval_shape(functools.partial(self.init, model), shapes)
        made = {}
        for name, tree in entries(like.moments).items():
            layers = tree[model.layers]
            if name in MOVED:
                layers = stacked(one_layer(layers), getattr(specs, name)[model.layers], None)
            else:
                layers = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layers)
            made[name] = {**getattr(first, name), model.layers: layers}
        return first._replace(**made)

    def opened(self, model: Model, params, state: State):
        stacks = {name: getattr(state, name)[model.layers] for name in MOVED}
        others = {name: model.outer(getattr(state, name)) for name in MOVED}

        def closed(stacks, others, near):
            moved = zip(MOVED, others.values(), stacks)
            return near._replace(**{k: v | {model.layers: layers} for k, v, layers in moved})

        return stacks, others, state._replace(mu=None, nu=None), closed

    def check(self, model: Model, params, state) -> None:
        if isinstance(state, AdamAState | RowState):
            self.tx.rule.check_rows(state.moments)
        check_shapes(model, functools.partial(self.init, model), (params, state))

    def specs(self, model: Model, params, parts, divided: str) -> State:
        everything = PartitionSpec()
        if self.tx.rule.moments == "int8":
            if divided != "nothing":
                raise OptimizerError(
                    f"specs: `divided` is {divided!r}, and the moments are stored in 8 bits, whose"
                    " rows have one scale each; expected 'nothing', or adama(..., moments='float')"
                )
            state = jax.eval_shape(functools.partial(self.init, model), params)
            return jax.tree.map(lambda _: everything, state)
        everywhere = jax.tree.map(lambda _: everything, params)
        moments = dict(everywhere if divided == "nothing" else parts)
        layers = moments[model.layers]
        moments[model.layers] = as_layers(layers, masters_of(layers))  # moments have no copies
        if self.tx.rule.second_moment != "row":
            return AdamAState(everything, everything, moments, moments)
        # Rows are divided if the divided axis is one of the axes that count rows.
        stack_of = {k: masters_of(v)[0] if k == model.layers else v for k, v in moments.items()}
        whole = {k: joined_shapes(v) if k == model.layers else v for k, v in params.items()}
        numbered = jax.eval_shape(functools.partial(self.init, model), whole).square
        of_rows = jax.tree.map(
            lambda rows, spec: PartitionSpec(*spec[: rows.ndim]), numbered, stack_of
        )
        return RowState(everything, everything, moments, moments, of_rows, of_rows)

    def minibatch(
        self, model: Model, clip: Clip, like, state, batch, key, by_layer: bool = False
    ) -> tuple[tuple[Any, Any], dict[str, Any]]:
        params, old = state
        rule, n = self.tx.rule, self.tx.rule.accumulation_steps
        if isinstance(old, RowState):
            square, sketch = (model.parted(params, rows) for rows in (old.square, old.sketch))
            old = old._replace(square=square, sketch=sketch)
        # Divided moments are recognised by their shapes; the state stores no layout.
        zero1 = any(
            a.shape != b.shape
            for a, b in zip(model.masters(like), jax.tree.leaves(shapes(old.mu)), strict=True)
        )
        # The mean gradient over devices is folded into divided moments, which are never reduced. So
        # nu must not start as a multiple of itself, as it does if the devices' moments are summed.
        begin = dataclasses.replace(rule, axis_name=None).decays if zero1 else rule.decays
        mean_over = rule.axis_name if zero1 else None
        # The numbers of microbatches continue from device to device, so that each microbatch has a
        # key of its own.
        first = 0 if rule.axis_name is None else jax.lax.axis_index(rule.axis_name) * n
        numbered = first + jnp.arange(n, dtype=jnp.int32), microbatches(batch, n)
        key_of = lambda i: None if key is None else jax.random.fold_in(key, i)

        def fold_of(i, update=None):
            # The first fold of a minibatch also decays the moments, which saves a pass over them.
            b1, b2 = (jnp.where(i == first, b, 1.0) for b in begin)
            use = Accumulation(rule, old.count, (b1, b2), update, mean_over, number=i)
            return Fold(use, clip, mean_over=mean_over)

        if by_layer or streams((params, old, model.frozen)):
            # Each device updates its own parts. Whole parameters with divided moments, or moments
            # that are reduced first, would be copied between host and device once more.
            parts = zip(model.masters(params), jax.tree.leaves(shapes(old.mu)), strict=True)
            several = rule.axis_name and jax.lax.axis_size(rule.axis_name) > 1
            if several and not (zero1 and all(p.shape == m.shape for p, m in parts)):
                raise OptimizerError(
                    f"released_step: the optimizer's `axis_name` is {rule.axis_name!r}, and the"
                    " state lies in host memory; expected data_parallel(mesh, 'states'), which"
                    " divides all that lies there over the devices"
                )
            given = like, (params, old), numbered, key_of, zero1
            new, components, losses = self._streamed(model, fold_of, *given)
            new = _stored(model, new, state)
            return new, metrics_of(components, losses, rule.axis_name, apart=not zero1)

        own = varying(whole(model, params, like, rule.axis_name), rule.axis_name)
        moments = varying(model.started(like, entries(old.moments)), rule.axis_name)

        def one(moments, indexed):
            i, part = indexed
            folds = [fold_of(i)] * (len(moments[0]) + 1)
            return backward(model, folds, own, moments, part, key_of(i))[:2]

        (outer, stacks), losses = jax.lax.scan(one, moments, numbered)
        # XLA inlines a loop of one iteration. Behind a barrier, as behind the end of a longer loop,
        # the update is not fused with the fold, and rounds as the update of a streamed step.
        apart = lambda m: jax.lax.optimization_barrier(m) if m["skipped"].shape == (1,) else m
        moments = outer, [*map(apart, stacks)]
        joined = {name: model.joined(params, moments, name) for name in entries(old.moments)}
        folded = old._replace(**joined)
        if zero1:
            new = updated(model.layers, rule, params, like, folded)
        else:
            updates, moved = self.tx.finish(folded, params, of_layers(model.layers, params))
            new = optax.apply_updates(params, updates), moved
        new = _stored(model, new, state)
        return new, metrics_of(moments, losses, rule.axis_name, apart=not zero1)

    def _streamed(
        self, model: Model, fold_of: Callable[..., Fold], like, state, microbatches, key_of, divided
    ):
        """Runs a minibatch whose layers' states are stored in host memory. Returns ((params,
        state), moments with their tallies, losses (microbatches,)).

        fold_of: `fold_of(i, update)` returns the `Fold` of microbatch i. `update` makes a
          component's new parameters, or is None.
        like: the parameters with their whole shapes.
        state: the pair (params, state). If a device has parts of arrays (ZeRO-3), it gathers a
          layer when the loop comes to the layer, and updates its own part. Rows are in as many
          stacks as the moments.
        microbatches: a pair of the microbatches' numbers and the batch's arrays, each with a
          leading axis of microbatches.
        key_of: `key_of(i)` returns the random key of microbatch i, or None.
        divided: whether a device has a part of the moments.
        """
        rule, (params, old) = self.tx.rule, state
        moments = model.started(params, entries(old.moments))
        outside_mask, layer_mask = _masks(rule, model, params)

        def updated(params, moments, mask, whole, stacked=None):
            masked = dataclasses.replace(rule, mask=mask)
            return masked.applied(params, moments, old.count, whole if divided else None, stacked)

        whole = whole_layer(model, like, rule.axis_name)
        gathered = whole_outside(model, params, like, rule.axis_name)

        def update(own, new, shapes):
            # The update reads the stored moments. If XLA fused the update with the fold, it would
            # compute the moments once more, and might round them otherwise.
            return updated(own, jax.lax.optimization_barrier(new), layer_mask, shapes, False)

        def one(carry, numbered, update=None):
            (moments, held), (i, part) = carry, numbered
            own = gathered
            if update is not None:
                # The forward reads the updated parameters from the loop's carry too. If it read
                # them from outside the loop, XLA would copy their stacks in host memory.
                stacks = as_layers(params[model.layers], [m["params"] for m in moments[1]])
                own = gathered | {model.layers: stacks}
            # `old.folded` is 0, so this is the fold of microbatch i. XLA does not know that. If XLA
            # knew that the decays of the last microbatch are 1, it would round otherwise.
            number = i + old.folded
            folds = [*[fold_of(number)] * len(moments[0]), fold_of(number, update)]
            moments, loss, held = backward(model, folds, own, moments, part, key_of(i), whole, held)
            return (moments, held), loss

        def with_params(carry):
            (outer, layers), held = carry
            stacks = parts_of(params[model.layers])
            return (outer, [m | {"params": p} for m, p in zip(layers, stacks)]), held

        carry = moments, fetched_first(model.with_frozen(read_of(gathered[model.layers])))
        last = lambda carry, numbered: one(carry, numbered, update)
        ((outer, layers), _), losses = last_apart(one, last, with_params, carry, microbatches)
        stacks = as_layers(params[model.layers], [m["params"] for m in layers])
        moments = {k: model.joined(params, (outer, layers), k) for k in entries(old.moments)}
        # One call updates all arrays: if a scalar divides only one array, XLA multiplies by the
        # reciprocal, so a call for each array would round otherwise than the resident step.
        of_outer = Moments(**{k: model.outer(tree) for k, tree in moments.items()})
        outside: Any
        outside, settled = updated(
            model.outer(params), brought(of_outer), outside_mask, model.outer(like), False
        )
        for k in entries(settled).keys() - {"mu", "nu"}:
            moments[k] |= getattr(settled, k)
        new = {k: stacks if k == model.layers else outside[k] for k in params}
        count, folded = optax.safe_increment(old.count), jnp.zeros_like(old.folded)
        made = old._replace(count=count, folded=folded, **moments)
        return (new, made), (outer, layers), losses


def _stored(model: Model, new, old):
    """Returns the new state with the rows of all layers in one array, in the dtypes of `old`."""
    params, state = new
    if isinstance(state, RowState):
        square, sketch = map(model.united, (state.square, state.sketch))
        state = state._replace(square=square, sketch=sketch)
    return jax.tree.map(lambda a, b: a.astype(b.dtype), (params, state), old)


def microbatches(batch, n: int, devices: int = 1):
    """Reshapes the batch's arrays to (microbatches of all devices, size of a microbatch, ...).
    Raises OptimizerError if `devices` times `n` does not divide the leading axis.
    """
    count = n * devices

    def one(path, a):
        if not jnp.ndim(a) or jnp.shape(a)[0] % count:
            over = f"{devices} devices times " if devices > 1 else ""
            raise OptimizerError(
                f"released_step: `batch{jax.tree_util.keystr(path)}` has shape {jnp.shape(a)};"
                f" expected a leading axis that {over}accumulation_steps = {n} divides"
            )
        return a.reshape(count, a.shape[0] // count, *a.shape[1:])

    return jax.tree.map_with_path(one, batch)


def last_apart(
    one: Callable, update: Callable, with_params: Callable, carry, numbered
) -> tuple[Any, Any]:
    """Runs the microbatches of a minibatch, the last one in a program of its own. Returns the carry
    and the losses of all microbatches.

    one: `one(carry, microbatch)` folds a microbatch, and returns the carry and the loss. All
      microbatches but the last only fold, and read the parameters from outside their loop.
    update: `one` for the last microbatch, which also updates the parameters in its carry.
    with_params: adds the parameters to the carry of `one`.
    numbered: a pair of the microbatches' numbers and the batch's arrays, each with a leading axis
      of microbatches.
    """
    before, last = (jax.tree.map(lambda a, s=s: a[s], numbered) for s in (slice(-1), -1))
    if len(numbered[0]) == 1:
        carry, loss = update(with_params(carry), last)
        return carry, jax.tree.map(lambda a: a[None], loss)
    carry, losses = jax.lax.scan(one, carry, before)
    of_last = jax.tree.map(lambda a: a[-1], losses)
    and_update = lambda carried, last: update(carried[0], last)
    carry, loss = _once(and_update, (with_params(carry), of_last), last)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), losses, loss)


def _once(body: Callable, carry, given):
    """Runs `body(carry, given)` in a loop of one iteration that XLA does not inline, since XLA does
    not know the number of iterations.

    If XLA inlined the loop, the last microbatch would be part of the same program as the others,
    and XLA would store the saved tensors of both: their stacks begin as zeros, which wait for no
    other value. The loop also keeps XLA from fusing the last microbatch with earlier operations, as
    the end of a longer loop does in a resident step.
    """

    def turn(i, carry):
        # Without the barrier, values that depend on `given` alone would be computed before the
        # loop.
        _, here = jax.lax.optimization_barrier((i, given))
        return body(carry, here)

    return jax.lax.fori_loop(0, jax.lax.optimization_barrier(jnp.int32(1)), turn, carry)


def _masks(rule: Rule, model: Model, params) -> tuple[Any, Any]:
    """Returns the mask of weight decay for the arrays outside the layers, and for a layer. Both are
    parts of the mask of the whole parameters with all layers in one stack.
    """
    whole = {k: joined_shapes(v) if k == model.layers else v for k, v in params.items()}
    mask = rule.mask_of(whole)
    return (None, None) if mask is None else (model.outer(mask), mask[model.layers])
