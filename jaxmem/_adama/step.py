"""The released step: a minibatch's microbatches one after the other, on one device or on each of
several.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem._adama.backward import backward
from jaxmem._adama.fold import Clip, Fold
from jaxmem._adama.gather import updated, whole
from jaxmem._adama.model import Model
from jaxmem._adama.transform import AdamA, AdamAState
from jaxmem._jax.vary import varying
from jaxmem._states.shards import placed, shards
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedStep:
    """`step(state, batch, key=None) -> (state, metrics)`, with `state` a pair (params, AdamAState).
    Donate it.

    Made by `jaxmem.released_step`. `batch`: a tree of arrays with a leading axis that
    `accumulation_steps` divides.
    `key`: a random key; microbatch i is given `fold_in(key, i)`, and its layer j `fold_in` of that
    and j. Metrics: `loss`, the mean over microbatches; `grad_norm`, the root mean square of the
    microbatches' gradient norms; `skipped`, how many folds were left out since a gradient was not
    finite, and `skipped_layers`, of these the layers', int32 (L,).
    """

    tx: AdamA
    model: Model
    clip: Clip

    def init(self, params) -> tuple[Any, Any]:
        """The first state."""
        self.model.check(params)
        return params, self.tx.init(params)

    def __call__(self, state, batch, key=None):
        return self._step(state[0], state, batch, key)

    def _step(self, like, state, batch, key=None):
        """`like`: the whole parameters' shapes; of `state`'s arrays, a device may have a part."""
        params, old = state
        self.model.check(like)
        rule, n = self.tx.rule, self.tx.rule.accumulation_steps
        zero1 = any(
            a.shape != b.shape for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(old.mu))
        )
        begin = dataclasses.replace(rule, axis_name=None).decays if zero1 else rule.decays
        own = varying(whole(self.model, params, like, rule.axis_name), rule.axis_name)
        moments = varying(self.model.started(like, old.mu, old.nu), rule.axis_name)

        def one(moments, indexed):
            i, part = indexed
            own_key = None if key is None else jax.random.fold_in(key, i)
            # within the first fold: no pass of its own
            b1, b2 = (jnp.where(i == first, b, 1.0) for b in begin)
            return backward(
                self.model, Fold(rule, self.clip, (b1, b2)), own, moments, part, own_key
            )

        first = 0 if rule.axis_name is None else jax.lax.axis_index(rule.axis_name) * n
        indices = first + jnp.arange(n, dtype=jnp.int32)
        moments, losses = jax.lax.scan(one, moments, (indices, _microbatches(batch, n)))
        mu, nu = (self.model.joined(params, moments, name) for name in ("mu", "nu"))
        folded = AdamAState(old.count, old.folded, mu, nu)
        if zero1:
            params, new = updated(self.model.layers, rule, params, folded)
        else:
            updates, new = self.tx.finish(folded, params)
            params = optax.apply_updates(params, updates)
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)
        return (params, new), self._metrics(moments, losses, zero1)

    def _metrics(self, moments, losses, zero1: bool):
        outer, layers = moments
        squares = sum((c["squares"] for c in outer), layers["squares"].sum()) / losses.shape[0]
        skipped = sum((c["skipped"] for c in outer), layers["skipped"].sum())
        found: dict[str, Any] = {
            "loss": losses.mean(),
            "squares": squares,
            "skipped": skipped,
            "layers": layers["skipped"],
        }
        if (axis := self.tx.rule.axis_name) is not None:
            counts = skipped, layers["skipped"]
            # with divided moments all devices skip as one
            counts = counts if zero1 else jax.lax.psum(counts, axis)
            found = dict(zip(found, (*jax.lax.pmean((found["loss"], squares), axis), *counts)))
        return {
            "loss": found["loss"],
            "grad_norm": jnp.sqrt(found["squares"]),
            "skipped": found["skipped"].astype(jnp.int32),
            "skipped_layers": found["layers"].astype(jnp.int32),
        }

    def data_parallel(self, mesh, divided: str = "nothing"):
        """The step over the devices of `mesh`'s axis `axis_name`, with the batch divided over them.

        mesh: a `jax.sharding.Mesh` that has the optimizer's axis.
        divided: what is divided beside the batch. "nothing": moments are each device's own until
          one all-reduce a minibatch, whatever the number of microbatches; the result is that of one
          device with as many times more microbatches (AdamA §3.3). "moments" (ZeRO-1): each device
          has a part of the moments, along an axis of theirs that the devices divide; each layer's
          mean gradient is reduce-scattered each microbatch, and parameters are all-gathered once;
          the result is that of one device with microbatches as many times larger. "states":
          parameters too; they are all-gathered as a minibatch starts, in `dtype` where the step was
          made with one.

        `specs` gives the state's layout. Microbatches are counted on from device to device, so that
        each has a key of its own.

        Raises OptimizerError if the optimizer was made without `axis_name`, or for another axis.
        """
        axis = self.tx.rule.axis_name
        if axis is None or axis not in mesh.shape:
            raise OptimizerError(
                f"data_parallel: the optimizer's `axis_name` is {axis!r}, and `mesh` has"
                f" {', '.join(map(repr, mesh.shape))};"
                " expected one of them: jaxmem.adama(..., axis_name=...)"
            )
        everything, over = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axis)

        def step(state, batch, key=None):
            layout = self.specs(state[0], mesh.shape[axis], divided)
            like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state[0])
            call = lambda state, batch, *key: self._step(like, state, batch, *key)
            keys = () if key is None else (key,)
            specs, out = (layout, over, *(everything for _ in keys)), (layout, everything)
            checked = divided == "nothing"  # what is gathered is equal everywhere: no type says so
            mapped = jax.shard_map(
                call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=checked
            )
            return mapped(*placed((state, batch, *keys), specs, mesh))

        return step

    def specs(self, params, devices: int, divided: str = "nothing"):
        """The PartitionSpecs of a state (params, AdamAState) of which this is divided over so many
        devices.

        Raises OptimizerError for another `divided` than `data_parallel` takes, or without
        `axis_name`.
        """
        axis, everything = self.tx.rule.axis_name, jax.sharding.PartitionSpec()
        if divided not in ("nothing", "moments", "states"):
            raise OptimizerError(
                f"specs: `divided` is {divided!r}; expected 'nothing', 'moments' or 'states'"
            )
        if axis is None:
            raise OptimizerError(
                "specs: the optimizer has no `axis_name`; expected the mesh axis to divide over"
            )
        model = {
            k: shards(v, devices, axis, first=int(k == self.model.layers))
            for k, v in params.items()
        }
        everywhere = jax.tree.map(lambda _: everything, params)
        moments = everywhere if divided == "nothing" else model
        return model if divided == "states" else everywhere, AdamAState(
            everything, everything, moments, moments
        )


def _microbatches(batch, n: int):
    """The batch's arrays with a leading axis of microbatches."""

    def one(path, a):
        if not jnp.ndim(a) or jnp.shape(a)[0] % n:
            raise OptimizerError(
                f"released_step: `batch{jax.tree_util.keystr(path)}` has shape {jnp.shape(a)};"
                " expected a leading axis that"
                f" accumulation_steps = {n} divides"
            )
        return a.reshape(n, a.shape[0] // n, *a.shape[1:])

    return jax.tree.map_with_path(one, batch)
