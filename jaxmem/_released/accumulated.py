"""AdamA as the optimizer of a released step: runs a minibatch's microbatches one after the other,
and updates the parameters at their end.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmem._adama.transform import AdamA, AdamAState
from jaxmem._jax.vary import varying
from jaxmem._released.backward import backward
from jaxmem._released.fold import Clip, Fold, Folds, Moments
from jaxmem._released.form import check_shapes
from jaxmem._released.gather import updated, whole
from jaxmem._released.model import Minibatch, Model
from jaxmem._released.streamed import minibatch
from jaxmem._states import layout
from jaxmem._states.stacks import like as as_layers
from jaxmem._states.stacks import masters_of
from jaxmem._states.store import streams
from jaxmem.errors import OptimizerError


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
        return self.tx.init(params)

    def created(self, model: Model, outer, layer: Callable, stacked: Callable, specs) -> AdamAState:
        one = jax.eval_shape(layer, jax.ShapeDtypeStruct((), jnp.int32))
        first = jax.tree.map(lambda a: layout.moved(a, layout.DEVICE), self.tx.init(outer))
        like = jax.eval_shape(self.tx.init, one)
        pairs = (like.mu, specs.mu), (like.nu, specs.nu)
        mu, nu = (stacked(shapes, spec[model.layers], None) for shapes, spec in pairs)
        return first._replace(mu={**first.mu, model.layers: mu}, nu={**first.nu, model.layers: nu})

    def opened(self, model: Model, params, state: AdamAState):
        others = state._replace(mu=model.outer(state.mu), nu=model.outer(state.nu))

        def closed(stacked, others):
            mu, nu = ({model.layers: layers} for layers in stacked)
            return others._replace(mu=others.mu | mu, nu=others.nu | nu)

        return {"mu": state.mu[model.layers], "nu": state.nu[model.layers]}, others, closed

    def check(self, model: Model, params, state) -> None:
        check_shapes(model, self.tx, (params, state))

    def specs(self, model: Model, params, parts, divided: str) -> AdamAState:
        everything = PartitionSpec()
        everywhere = jax.tree.map(lambda _: everything, params)
        moments = dict(everywhere if divided == "nothing" else parts)
        layers = moments[model.layers]
        moments[model.layers] = as_layers(layers, masters_of(layers))  # which have no copies
        return AdamAState(everything, everything, moments, moments)

    def minibatch(
        self, model: Model, clip: Clip, like, state, batch, key, by_layer: bool = False
    ) -> Minibatch:
        params, old = state
        rule, n = self.tx.rule, self.tx.rule.accumulation_steps
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
            return Fold(Moments(rule, (b1, b2), update), clip, mean_over=mean_over)

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
            new, moments, losses = minibatch(model, rule, fold_of, like, state, numbered, key_of)
            new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, state)
            return Minibatch(new, moments, losses, not zero1)

        own = varying(whole(model, params, like, rule.axis_name), rule.axis_name)
        moments = varying(model.started(like, old.mu, old.nu), rule.axis_name)

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
        mu, nu = (model.joined(params, moments, name) for name in ("mu", "nu"))
        folded = AdamAState(old.count, old.folded, mu, nu)
        if zero1:
            params, new = updated(model.layers, rule, params, folded)
        else:
            updates, new = self.tx.finish(folded, params)
            params = optax.apply_updates(params, updates)
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)
        return Minibatch((params, new), moments, losses, not zero1)


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
