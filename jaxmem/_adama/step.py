"""The released step: runs a minibatch's microbatches one after the other, on one device or on each
of several, and updates the parameters at their end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem._adama import placement
from jaxmem._adama.backward import backward
from jaxmem._adama.fold import Clip, Fold, Folds, Moments
from jaxmem._adama.gather import updated, whole
from jaxmem._adama.model import Model
from jaxmem._adama.streamed import minibatch
from jaxmem._adama.transform import AdamA, AdamAState
from jaxmem._jax.vary import varying
from jaxmem._states.shards import placed, shards
from jaxmem._states.store import streams
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedStep:
    """`step(state, batch, key=None) -> (state, metrics)`, as `jaxmem.released_step` makes it.

    `state` is a pair (params, AdamAState); donate it. `batch` is a tree of arrays with a leading
    axis that `accumulation_steps` divides. `key` is a random key: microbatch i is given
    `fold_in(key, i)`, and its layer j `fold_in` of that and j.

    `metrics` is a dict: `loss`, the mean over microbatches; `grad_norm`, the root mean square of
    the microbatches' gradient norms; `skipped`, how many folds were left out since a gradient was
    not finite, int32; `skipped_layers`, how many of these were of each layer, int32 (L,).

    tx: the optimizer.
    model: the model as three functions.
    clip: how gradients are clipped.
    """

    tx: AdamA
    model: Model
    clip: Clip

    def init(self, params) -> tuple[Any, Any]:
        """Makes the first state, the pair (params, AdamAState).

        Raises OptimizerError for parameters that `released_step` cannot take.
        """
        self.model.check(params)
        return params, self.tx.init(params)

    def create(self, outer, layer: Callable, count: int, persist: int = 0) -> tuple[Any, Any]:
        """Makes the first state of a model that need not fit into the device's memory: that of
        `split(init(params), persist)`, a layer at a time, each in its place.

        outer: the parameters outside the layers, a dict.
        layer: `layer(i)` makes the parameters of layer i, an int32 that is traced.
        count: how many layers there are.
        persist: of how many layers, the first ones, the states lie in device memory.

        Raises OptimizerError as `init` and `split` do.
        """
        return placement.created(self.model, self.tx, outer, layer, count, persist)

    def split(self, state, persist: int) -> tuple[Any, Any]:
        """Moves the states of all layers but the first `persist` to pinned host memory, from which
        a step copies them a layer at a time (ProTrain's persistent chunks). All other arrays lie in
        device memory.

        Arrays that move are deleted where they were, a parameter's and a moment's at a time.
        `state` may be in any form, and of shapes: the result then tells where they lie. No
        value changes: steps from the result are those of a resident state, to the last bit in
        float32 where nothing is clipped.

        Raises OptimizerError if `persist` is no number from 0 to the number of layers.
        """
        return placement.split(self.model, state, persist)

    def joined(self, state) -> tuple[Any, Any]:
        """The state with each of the layers' arrays as one stack again, which no placement changes:
        what checkpoints hold. The stack lies in host memory if a part of it did. Arrays that move
        are deleted where they were.
        """
        return placement.joined(self.model, state)

    def __call__(self, state, batch, key=None):
        return self._step(state[0], state, batch, key)

    def _step(self, like, state, batch, key=None):
        """Runs one minibatch, on one device or inside `jax.shard_map` on each of several.

        `like` has the whole parameters' shapes; of the arrays of `state` a device may have a part.
        """
        params, old = state
        self.model.check(like)
        rule, n = self.tx.rule, self.tx.rule.accumulation_steps
        # Divided moments are told by their shapes; no layout is stored beside the state.
        zero1 = any(
            a.shape != b.shape for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(old.mu))
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
            return Fold(Moments(rule, (b1, b2), update), self.clip, mean_over=mean_over)

        if streams((params, old)):
            # Each device updates what it has: whole parameters of which it has a part of the
            # moments, or moments that are to be reduced first, would cross once more.
            parts = zip(jax.tree.leaves(params), jax.tree.leaves(old.mu))
            if rule.axis_name and not (zero1 and all(p.shape == m.shape for p, m in parts)):
                raise OptimizerError(
                    f"released_step: the optimizer's `axis_name` is {rule.axis_name!r}, and the"
                    " state lies in host memory; expected data_parallel(mesh, 'states'), which"
                    " divides all that lies there over the devices"
                )
            new, moments, losses = minibatch(
                self.model, rule, fold_of, like, state, numbered, key_of
            )
            return jax.tree.map(lambda a, b: a.astype(b.dtype), new, state), self._metrics(
                moments, losses, zero1
            )

        own = varying(whole(self.model, params, like, rule.axis_name), rule.axis_name)
        moments = varying(self.model.started(like, old.mu, old.nu), rule.axis_name)

        def one(moments, indexed):
            i, part = indexed
            fold = fold_of(i)
            folds = Folds([fold] * len(moments[0]), fold)
            return backward(self.model, folds, own, moments, part, key_of(i))

        moments, losses = jax.lax.scan(one, moments, numbered)
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
        """The metrics of a minibatch, from its tallies; `losses` has one entry a microbatch."""
        outer, stacks = moments
        # One entry a layer, of all stacks in order.
        layers = {k: jnp.concatenate([m[k] for m in stacks]) for k in ("squares", "skipped")}
        # Squares are summed over components and microbatches: divided by the number of microbatches
        # they give the mean of the squared norms.
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
            # With divided moments a component's norm is of all devices, so all skip it together.
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
            # Gathered arrays are equal on all devices, but their types do not say so: unchecked.
            checked = divided == "nothing"
            mapped = jax.shard_map(
                call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=checked
            )
            return mapped(*placed((state, batch, *keys), specs, mesh))

        return step

    def specs(self, params, devices: int, divided: str = "nothing"):
        """The PartitionSpecs of a state (params, AdamAState), for `data_parallel` with the same
        `divided`.

        params: the parameters, or their shapes.
        devices: how many devices `axis_name` has.
        divided: "nothing", "moments" or "states".

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
        # A layer is read by its index, so stacked arrays are divided along a later axis than the
        # first.
        parts = {
            k: shards(v, devices, axis, first=int(k == self.model.layers))
            for k, v in params.items()
        }
        everywhere = jax.tree.map(lambda _: everything, params)
        moments = everywhere if divided == "nothing" else parts
        return parts if divided == "states" else everywhere, AdamAState(
            everything, everything, moments, moments
        )


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
