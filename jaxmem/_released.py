"""released_step(): a training step whose backward folds each layer's gradient into Adam's moments and lets it go."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem._adama import AdamA, AdamAState
from jaxmem._errors import OptimizerError
from jaxmem._released_backward import Parts, backward
from jaxmem._released_fold import Clip
from jaxmem._shards import assembled, gathered, part_of, placed, refilled, shards
from jaxmem._vary import varying


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedStep:
    """`step(state, batch, key=None) -> (state, metrics)`, with `state` a pair (params, AdamAState). Donate it.

    Made by `jaxmem.released_step`. `batch`: a tree of arrays with a leading axis that `accumulation_steps` divides.
    `key`: a random key; microbatch i is given `fold_in(key, i)`, and its layer j `fold_in` of that and j. Metrics: `loss`,
    the mean over microbatches; `grad_norm`, the root mean square of the microbatches' gradient norms; `skipped`, how many
    folds were left out since a gradient was not finite, and `skipped_layers`, of these the layers', int32 (L,).
    """

    tx: AdamA
    parts: Parts
    clip: Clip

    def init(self, params) -> tuple[Any, Any]:
        """The first state."""
        self.parts.check(params)
        return params, self.tx.init(params)

    def __call__(self, state, batch, key=None):
        return self._step(state[0], state, batch, key)

    def _step(self, like, state, batch, key=None):
        """`like`: the whole parameters' shapes; of `state`'s arrays, a device may have a part."""
        params, old = state
        self.parts.check(like)
        rule, n = self.tx.rule, self.tx.rule.accumulation_steps
        zero1 = any(a.shape != b.shape for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(old.mu)))
        begin = dataclasses.replace(rule, axis_name=None) if zero1 else rule
        own = varying(self._whole(params, like), rule.axis_name)
        moments = varying(self.parts.started(like, *begin.begin(old.mu, old.nu)), rule.axis_name)

        def one(moments, indexed):
            i, part = indexed
            own_key = None if key is None else jax.random.fold_in(key, i)
            return backward(self.parts, rule, self.clip, own, moments, part, own_key)

        first = 0 if rule.axis_name is None else jax.lax.axis_index(rule.axis_name) * n
        indices = first + jnp.arange(n, dtype=jnp.int32)
        moments, losses = jax.lax.scan(one, moments, (indices, _microbatches(batch, n)))
        mu, nu = (self.parts.joined(params, moments, name) for name in ("mu", "nu"))
        if zero1:
            params, new = self._over_shards(params, AdamAState(old.count, old.folded, mu, nu))
        else:
            updates, new = self.tx.finish(AdamAState(old.count, old.folded, mu, nu), params)
            params = optax.apply_updates(params, updates)
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)
        return (params, new), self._metrics(moments, losses, zero1)

    def _over_shards(self, params, state: AdamAState):
        """Each device updates its part of the parameters, and all gather what each holds whole (ZeRO-1)."""
        rule, axis = self.tx.rule, self._axis
        mine = jax.tree.map(lambda p, m: part_of(p, m, axis), params, state.mu)
        updates = rule.updates(state.mu, state.nu, state.count, mine)
        new = self._gathered(params, optax.apply_updates(mine, updates))
        return new, state._replace(count=optax.safe_increment(state.count))

    @property
    def _axis(self) -> str:
        assert self.tx.rule.axis_name is not None, "arrays are parts, and there is no axis"
        return self.tx.rule.axis_name

    def _whole(self, params, like):
        """The parameters, gathered in the layers' dtype where each device has a part of them."""
        dtype, name = self.parts.dtype, self.parts.layers

        def one(a, whole):
            if a.shape == whole.shape:
                return a
            return gathered(a if dtype is None else a.astype(dtype), whole, self._axis)

        leaves, structure = jax.tree.flatten(params[name])
        shapes = jax.tree.leaves(like[name])
        if all(a.shape == b.shape for a, b in zip(leaves, shapes)):
            layers = params[name]
        else:
            layers = jax.tree.unflatten(structure, assembled(leaves, shapes, self._axis, dtype))
        return {k: layers if k == name else jax.tree.map(one, v, like[k]) for k, v in params.items()}

    def _gathered(self, params, parts):
        """`params`, whole, out of the devices' parts: the layers' in place."""
        outer = lambda name: jax.tree.map(lambda a, p: gathered(a, p, self._axis), parts[name], params[name])
        layers = lambda name: refilled(params[name], parts[name], self._axis)
        return {name: layers(name) if name == self.parts.layers else outer(name) for name in params}

    def _metrics(self, moments, losses, zero1: bool):
        outer, layers = moments
        squares = sum((c["squares"] for c in outer), layers["squares"].sum()) / losses.shape[0]
        skipped = sum((c["skipped"] for c in outer), layers["skipped"].sum())
        found = {"loss": losses.mean(), "squares": squares, "skipped": skipped, "layers": layers["skipped"]}
        if (axis := self.tx.rule.axis_name) is not None:
            counts = skipped, layers["skipped"]
            counts = counts if zero1 else jax.lax.psum(counts, axis)  # with divided moments all devices skip as one
            found = dict(zip(found, (*jax.lax.pmean((found["loss"], squares), axis), *counts)))
        whole = lambda a: a.astype(jnp.int32)
        return {
            "loss": found["loss"],
            "grad_norm": jnp.sqrt(found["squares"]),
            "skipped": whole(found["skipped"]),
            "skipped_layers": whole(found["layers"]),
        }

    def data_parallel(self, mesh, divided: str = "nothing"):
        """The step over the devices of `mesh`'s axis `axis_name`, with the batch divided over them.

        `divided`: what else is. "nothing": moments are each device's own until one all-reduce a minibatch, whatever the
        number of microbatches; the result is that of one device with as many times more microbatches (AdamA §3.3).
        "moments" (ZeRO-1): each device has a part of the moments, along an axis of theirs that the devices divide; each
        layer's mean gradient is reduce-scattered each microbatch, and parameters are all-gathered once; the result is
        that of one device with microbatches as many times larger. "states": parameters too; they are all-gathered
        as a minibatch starts, in `dtype` where the step was made with one. `specs` gives the state's layout.
        Raises OptimizerError if the optimizer was made without `axis_name`, or for another axis.
        """
        axis = self.tx.rule.axis_name
        if axis is None or axis not in mesh.shape:
            raise OptimizerError(
                f"data_parallel: the optimizer's `axis_name` is {axis!r}, and `mesh` has {', '.join(map(repr, mesh.shape))};"
                " expected one of them: jaxmem.adama(..., axis_name=...)"
            )
        whole, over = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axis)

        def step(state, batch, key=None):
            layout = self.specs(state[0], mesh.shape[axis], divided)
            like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state[0])
            call = lambda state, batch, *key: self._step(like, state, batch, *key)
            keys = () if key is None else (key,)
            specs, out = (layout, over, *(whole for _ in keys)), (layout, whole)
            checked = divided == "nothing"  # what is gathered is equal everywhere, which no type says
            mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=checked)
            return mapped(*placed((state, batch, *keys), specs, mesh))

        return step

    def specs(self, params, devices: int, divided: str = "nothing"):
        """The PartitionSpecs of a state (params, AdamAState) of which this is divided over so many devices.

        Raises OptimizerError for another `divided` than `data_parallel` takes, or without `axis_name`.
        """
        axis, whole = self.tx.rule.axis_name, jax.sharding.PartitionSpec()
        if divided not in ("nothing", "moments", "states"):
            raise OptimizerError(f"specs: `divided` is {divided!r}; expected 'nothing', 'moments' or 'states'")
        if axis is None:
            raise OptimizerError("specs: the optimizer has no `axis_name`; expected the mesh axis to divide over")
        parts = {k: shards(v, devices, axis, first=int(k == self.parts.layers)) for k, v in params.items()}
        everywhere = jax.tree.map(lambda _: whole, params)
        moments = everywhere if divided == "nothing" else parts
        return parts if divided == "states" else everywhere, AdamAState(whole, whole, moments, moments)


def released_step(
    tx: AdamA,
    embed: Callable,
    block: Callable,
    head: Callable,
    *,
    layers: str = "layers",
    plan=None,
    label: str = "block",
    dtype=None,
    has_aux: bool = False,
    clip: tuple[str, float] | None = None,
) -> ReleasedStep:
    """A training step that never holds a model's gradient: each layer's is folded as it appears (AdamA §3.2).

    `tx`: from `jaxmem.adama` or its kin. Parameters are a dict; those under `layers` are stacked, as for `jaxmem.stack`,
    and the others are `outer`. `embed(outer, microbatch) -> x`, or a tuple of x and what all layers share;
    `block(p_i, x, *shared) -> x`; `head(outer, x, microbatch) -> loss`, a mean. With a key, `embed` and `block` are called
    with `key=` too. `has_aux`: `block` returns (x, aux), and `head` is called with every layer's aux after x. `plan`,
    `label` and `dtype` are those of `jaxmem.stack`.

    Outside the layers an array is folded when its whole gradient exists: what `head` alone reads, before the layers'
    backward; what both read, such as tied embeddings, at the end. `clip`: None; ("value", c); ("component", c), the norm of
    each layer and of each array outside; or ("norm", c), the exact global norm of a microbatch's gradient, for which
    the layers' backward runs twice: about 1.7 times the step.

    Raises OptimizerError if `tx` is no AdamA, such as a chain, or needs the whole gradient; for arguments that are not
    callable; when called, for parameters or a batch that do not fit.
    """
    if not isinstance(tx, AdamA):
        raise OptimizerError(f"released_step: `tx` is {_named(tx)}")
    if tx.rule.nesterov:
        raise OptimizerError(
            "released_step: `tx` has `nesterov`, whose update needs the whole gradient; use jaxmem.adama without"
        )
    if not isinstance(tx.rule.accumulation_steps, int):
        raise OptimizerError("released_step: `tx` has a traced `accumulation_steps`; expected a Python int")
    for name, function in (("embed", embed), ("block", block), ("head", head)):
        if not callable(function):
            raise OptimizerError(f"released_step: `{name}` is {type(function).__name__}; expected a function")
    return ReleasedStep(tx, Parts(embed, block, head, layers, plan, label, dtype, has_aux), Clip.of(clip))


def _named(tx) -> str:
    """What is wrong with a `tx` that is no AdamA."""
    names = _transformations(getattr(tx, "update", None))
    if "clip_by_global_norm" in names:
        return (
            "a chain with optax.clip_by_global_norm; a global norm needs every layer's gradient at once, and each is let go"
            " as it appears: expected jaxmem.adama(...) alone, with clip=('value', c), clip=('component', c), or"
            " clip=('norm', c), which is exact and takes a second backward"
        )
    return (
        f"{type(tx).__name__}; expected what jaxmem.adama, adamaw_a or scale_by_adama returned, alone: rates, schedules and"
        " decay are its arguments, and clipping is `clip`"
    )


def _transformations(update, depth: int = 4) -> set[str]:
    """Names of the optax functions whose updates a function calls, as far as its closure tells."""
    if not callable(update) or not depth:
        return set()
    held = [c.cell_contents for c in getattr(update, "__closure__", None) or ()]
    inner = [f for h in held for f in (h if isinstance(h, tuple | list) else (h,))]
    name = getattr(update, "__qualname__", "").split(".")[0]
    return {name}.union(*(_transformations(getattr(f, "update", f), depth - 1) for f in inner))


def _microbatches(batch, n: int):
    """The batch's arrays with a leading axis of microbatches."""

    def one(path, a):
        if not jnp.ndim(a) or jnp.shape(a)[0] % n:
            raise OptimizerError(
                f"released_step: `batch{jax.tree_util.keystr(path)}` has shape {jnp.shape(a)}; expected a leading axis that"
                f" accumulation_steps = {n} divides"
            )
        return a.reshape(n, a.shape[0] // n, *a.shape[1:])

    return jax.tree.map_with_path(one, batch)
