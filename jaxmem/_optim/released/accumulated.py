"""AdamA as the optimizer of a released step: runs a minibatch's microbatches one after the other,
and updates the parameters at their end.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmem._model.states import layout
from jaxmem._model.states.stacks import joined_shapes, masters_of, one_layer
from jaxmem._model.states.stacks import like as as_layers
from jaxmem._model.states.store import streams
from jaxmem._optim.adama.transform import AdamA, AdamAState, RowState, State
from jaxmem._optim.released.backward import backward
from jaxmem._optim.released.fold import Clip, Fold, Folds, Gathering, entries
from jaxmem._optim.released.form import check_shapes
from jaxmem._optim.released.gather import of_layers, updated, whole
from jaxmem._optim.released.model import Minibatch, Model
from jaxmem._optim.released.streamed import minibatch
from jaxmem._trace.vary import varying
from jaxmem.errors import OptimizerError

MOVED = "mu", "nu"  # what placements move of a state


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulated:
    """The optimizer of a released step that folds microbatches into moments. The methods are those
    of `step.Optimizer`.

    tx: the transformation.
    """

    tx: AdamA

    @property
    def axis_name(self) -> str | None:
        return self.tx.rule.axis_name

    def init(self, model: Model, params):
        """The first state. Its rows are in one array for all layers, wherever states lie."""
        state: Any = self.tx.init(params)
        if isinstance(state, AdamAState):
            return state
        # A stack of numbers has a row for each layer, as all other stacks have.
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
        everywhere = jax.tree.map(lambda _: everything, params)
        moments = dict(everywhere if divided == "nothing" else parts)
        layers = moments[model.layers]
        moments[model.layers] = as_layers(layers, masters_of(layers))  # which have no copies
        if self.tx.rule.second_moment != "row":
            return AdamAState(everything, everything, moments, moments)
        # Rows are divided where the axis that is divided is one that they are counted by.
        stack_of = {k: masters_of(v)[0] if k == model.layers else v for k, v in moments.items()}
        whole = {k: joined_shapes(v) if k == model.layers else v for k, v in params.items()}
        numbered = jax.eval_shape(functools.partial(self.init, model), whole).square
        of_rows = jax.tree.map(
            lambda rows, spec: PartitionSpec(*spec[: rows.ndim]), numbered, stack_of
        )
        return RowState(everything, everything, moments, moments, of_rows, of_rows)

    def minibatch(
        self, model: Model, clip: Clip, like, state, batch, key, by_layer: bool = False
    ) -> Minibatch:
        params, old = state
        rule, n = self.tx.rule, self.tx.rule.accumulation_steps
        if isinstance(old, RowState):
            square, sketch = (model.parted(params, rows) for rows in (old.square, old.sketch))
            old = old._replace(square=square, sketch=sketch)
        # Divided moments are told by their shapes; no layout is stored beside the state.
        zero1 = any(
            a.shape != b.shape
            for a, b in zip(model.masters(like), jax.tree.leaves(old.mu), strict=True)
        )
        # Divided moments are folded with the devices' mean gradient, and never reduced. So nu must
        # not start as a multiple of itself, as it does where the devices' own moments are summed.
        begin = dataclasses.replace(rule, axis_name=None).decays if zero1 else rule.decays
        mean_over = rule.axis_name if zero1 else None
        # Microbatches are counted on from device to device, so that each has a key of its own.
        first = 0 if rule.axis_name is None else jax.lax.axis_index(rule.axis_name) * n
        numbered = first + jnp.arange(n, dtype=jnp.int32), _microbatches(batch, n)
        key_of = lambda i: None if key is None else jax.random.fold_in(key, i)

        def fold_of(i, update=None):
            # The first fold of the minibatch also decays the moments, which saves a pass over them.
            b1, b2 = (jnp.where(i == first, b, 1.0) for b in begin)
            use = Gathering(rule, old.count, (b1, b2), update, mean_over)
            return Fold(use, clip, mean_over=mean_over)

        if by_layer or streams((params, old)):
            # Each device updates what it has: whole parameters of which it has a part of the
            # moments, or moments that are to be reduced first, would cross once more.
            parts = zip(model.masters(params), jax.tree.leaves(old.mu), strict=True)
            several = rule.axis_name and jax.lax.axis_size(rule.axis_name) > 1
            if several and not (zero1 and all(p.shape == m.shape for p, m in parts)):
                raise OptimizerError(
                    f"released_step: the optimizer's `axis_name` is {rule.axis_name!r}, and the"
                    " state lies in host memory; expected data_parallel(mesh, 'states'), which"
                    " divides all that lies there over the devices"
                )
            given = like, (params, old), numbered, key_of, zero1
            new, components, losses = minibatch(model, rule, fold_of, *given)
            return Minibatch(_stored(model, new, state), components, losses, not zero1)

        own = varying(whole(model, params, like, rule.axis_name), rule.axis_name)
        moments = varying(model.started(like, entries(old.moments)), rule.axis_name)

        def one(moments, indexed):
            i, part = indexed
            fold = fold_of(i)
            folds = Folds([fold] * len(moments[0]), fold)
            return backward(model, folds, own, moments, part, key_of(i))[:2]

        (outer, stacks), losses = jax.lax.scan(one, moments, numbered)
        # XLA takes a loop of one turn apart. Behind a barrier, as behind the end of a longer loop,
        # the update is not fused with the fold, and rounds as that of a step that streams.
        apart = lambda m: jax.lax.optimization_barrier(m) if m["skipped"].shape == (1,) else m
        moments = outer, [*map(apart, stacks)]
        joined = {name: model.joined(params, moments, name) for name in entries(old.moments)}
        folded = old._replace(**joined)
        if zero1:
            new = updated(model.layers, rule, params, like, folded)
        else:
            updates, moved = self.tx.finish(folded, params, of_layers(model.layers, params))
            new = optax.apply_updates(params, updates), moved
        return Minibatch(_stored(model, new, state), moments, losses, not zero1)


def _stored(model: Model, new, old):
    """The new state with its rows in one array for all layers, and in the dtypes of the old one."""
    params, state = new
    if isinstance(state, RowState):
        square, sketch = map(model.united, (state.square, state.sketch))
        state = state._replace(square=square, sketch=sketch)
    return jax.tree.map(lambda a, b: a.astype(b.dtype), (params, state), old)


def _microbatches(batch, n: int):
    """The batch's arrays as (microbatches, size of one, ...). Raises OptimizerError where `n` does
    not divide the leading axis.
    """

    def one(path, a):
        if not jnp.ndim(a) or jnp.shape(a)[0] % n:
            raise OptimizerError(
                f"released_step: `batch{jax.tree_util.keystr(path)}` has shape {jnp.shape(a)};"
                " expected a leading axis that"
                f" accumulation_steps = {n} divides"
            )
        return a.reshape(n, a.shape[0] // n, *a.shape[1:])

    return jax.tree.map_with_path(one, batch)
