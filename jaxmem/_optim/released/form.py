"""Checks that the parameters and the optimizer's state of a released step belong to one model and
are split alike, and that devices can divide them.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from jaxmem._model.loop.arguments import lengths_of
from jaxmem._model.states.layout import is_split, joined_shapes, length, masters_of, parts_of
from jaxmem._model.states.store import streams
from jaxmem._optim.adama.eight_bits import is_quantized
from jaxmem._optim.released.fold import Clip, entries
from jaxmem._optim.released.model import Model
from jaxmem.errors import OptimizerError


def check_pair(model: Model, state) -> None:
    """Raises OptimizerError unless `state` is a pair whose first entry has the model's
    parameters.
    """
    check_is_pair(state)
    model.check(state[0])


def check_is_pair(state) -> None:
    """Raises OptimizerError unless `state` is a pair."""
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise OptimizerError(
            f"released_step: `state` is {type(state).__name__}; expected the pair"
            " (params, optimizer state) that step.init(params) makes"
        )


def axis_in(method: str, axis: str | None, mesh) -> str:
    """Returns the mesh axis of data parallelism. Raises OptimizerError if `mesh` is no mesh, or has
    no such axis.

    method: the method that was called.
    axis: the optimizer's `axis_name`.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise OptimizerError(
            f"{method}: `mesh` is {type(mesh).__name__}; expected a jax.sharding.Mesh, such as"
            " jax.make_mesh((jax.device_count(),), ('data',))"
        )
    if axis is None or axis not in mesh.shape:
        raise OptimizerError(
            f"{method}: the optimizer's `axis_name` is {axis!r}, and `mesh` has"
            f" {', '.join(map(repr, mesh.shape))}; expected one of them: jaxmem.adama(...,"
            " axis_name=...), or of another optimizer's step, released_step(..., axis_name=...)"
        )
    return axis


def check_axis(axis: str | None) -> None:
    """Raises OptimizerError if a step over the mesh axis `axis` is called outside of
    `jax.shard_map`.
    """
    try:
        _ = axis and jax.lax.axis_size(axis)
    except NameError as error:
        raise OptimizerError(
            f"released_step: the optimizer's `axis_name` is {axis!r}, and the step is called"
            " without a mesh; expected step.data_parallel(mesh)(state, batch), or a call inside"
            " jax.shard_map; or no `axis_name` for a step of one device"
        ) from error


def check_untraced(method: str, name: str, tree) -> None:
    """Raises OptimizerError if an array of `tree` is traced: a traced array has no memory.

    method: the method that was called.
    name: the method's argument that has the value `tree`.
    """
    for path, a in jax.tree.leaves_with_path(tree):
        if isinstance(a, Tracer):
            raise OptimizerError(
                f"{method}: `{name}{jax.tree_util.keystr(path)}` is traced, as inside of jax.jit or"
                " jax.eval_shape; expected arrays that lie in some memory, since they are moved or"
                f" joined by others there: call `{method}` outside"
            )


def check_new(model: Model, params) -> None:
    """Raises OptimizerError if the parameters of a new state are split already, or are stored in
    host memory. Raises StackError if the layers' parameters are not stacked.
    """
    layers, name = params[model.layers], f"params[{model.layers!r}]"
    already = any(map(is_split, jax.tree.leaves(layers, is_leaf=is_split)))
    there = [path for path, a in jax.tree.leaves_with_path(params) if streams(a)]
    if already or there:
        what = f"`{name}` is split already"
        if not already:
            what = f"`params{jax.tree_util.keystr(there[0])}` lies in host memory"
        raise OptimizerError(
            f"released_step: {what}; expected parameters in device memory, the layers' in one stack"
            " each: make their state first and move it by step.split(state, ...), or make a model"
            " that the device cannot hold by step.create(...)"
        )
    check_stacks(model, params)


def check_stacks(model: Model, params) -> None:
    """Raises StackError if the layers' parameters are not stacks of at least one layer."""
    lengths_of(params[model.layers], f"params[{model.layers!r}]")


def check_clip(clip: Clip, params) -> None:
    """Raises OptimizerError if `clip` is by value and a parameter is complex."""
    for path, a in jax.tree.leaves_with_path(params) if clip.how == "value" else ():
        if jnp.issubdtype(a.dtype, jnp.complexfloating):
            raise OptimizerError(
                f"released_step: `clip` is ('value', {clip.at}), and"
                f" `params{jax.tree_util.keystr(path)}` is {a.dtype}: complex values have no order;"
                " expected ('component', c) or ('norm', c), which clip norms, or real parameters"
            )


def check_shapes(model: Model, init: Callable, state) -> None:
    """Raises OptimizerError unless `state` has the moments that `init` makes for its parameters, in
    any split and of any dtype. Raises StackError if the layers' parameters are not stacked.
    """
    params, old = state
    check_stacks(model, params)
    whole = _whole(model, params)
    want = jax.eval_shape(init, whole)
    if type(old) is not type(want):
        raise OptimizerError(
            f"released_step: `state[1]` is {type(old).__name__}; expected {type(want).__name__}, as"
            " step.init(params) makes it"
        )
    for name, like in entries(want.moments).items():
        made = _whole(model, getattr(old, name))
        if made is None:
            raise OptimizerError(
                f"released_step: `state[1].{name}` has a stack whose arrays disagree about how many"
                " layers it has; expected the moments of these parameters: step.init(params)"
            )
        if jax.tree.structure(made) != jax.tree.structure(like):
            raise OptimizerError(
                f"released_step: `state[1].{name}` has {_keys(made)}, and `params` has"
                f" {_keys(like)}; expected the moments of these parameters: step.init(params)"
            )
        for (path, a), b in zip(jax.tree.leaves_with_path(made), jax.tree.leaves(like)):
            if a.shape != b.shape:
                raise OptimizerError(
                    f"released_step: `state[1].{name}{jax.tree_util.keystr(path)}` has shape"
                    f" {a.shape}; expected {b.shape}, that of the moments of these parameters:"
                    " step.init(params)"
                )


def check_split(stacks: dict[str, Any]) -> None:
    """Raises OptimizerError unless the layers of the parameters and of the optimizer's state are
    split alike. The stacks may be stored in any memory.

    stacks: the layers' arrays, by their names in errors.
    """
    if any(not _even(layers) for layers in stacks.values()):
        return
    found = {k: [*map(length, parts_of(v))] for k, v in stacks.items()}
    if len({*map(tuple, found.values())}) == 1:
        return
    several = next(lengths for lengths in found.values() if len(lengths) > 1)
    said = ", ".join(f"`{k}` as {' + '.join(map(str, v))}" for k, v in found.items())
    raise OptimizerError(
        f"released_step: the layers' arrays are split unlike each other: {said} layers; expected"
        f" one split: step.split(state, {several[0]}), or another number of layers that stay in"
        " device memory"
    )


def check_divided(model: Model, params, devices: int) -> None:
    """Raises OptimizerError if the devices cannot divide the layers' largest array."""
    layers = jax.tree.leaves_with_path(joined_shapes(params[model.layers]))
    path, largest = max(layers, key=lambda found: math.prod(found[1].shape))
    divides = lambda count: any(n % count == 0 for n in largest.shape[1:])
    if not largest.shape[1:] or divides(devices):
        return
    fewer = next(count for count in range(devices - 1, 0, -1) if divides(count))
    raise OptimizerError(
        f"specs: `params[{model.layers!r}]{jax.tree_util.keystr(path)}`, the largest array of the"
        f" layers, has shape {largest.shape}, and {devices} devices divide none of its dimensions"
        f" after the first, so that each would hold it whole; expected {fewer} devices, or another"
        " number that divides one"
    )


def _whole(model: Model, tree):
    """Returns the shapes of `tree`, a dict like the parameters, with the layers as one stack.
    Returns None if the arrays of a stack have different numbers of layers. An object that is not
    such a dict is returned unchanged.
    """
    if not isinstance(tree, dict) or model.layers not in tree:
        return tree
    if not _even(tree[model.layers]):
        return None
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    return {
        k: joined_shapes(v) if k == model.layers else jax.tree.map(shape, v)
        for k, v in tree.items()
    }


def _even(layers) -> bool:
    """Whether the arrays of each stack have one number of layers."""
    return all(len({a.shape[0] for a in jax.tree.leaves(s)}) == 1 for s in masters_of(layers))


def _keys(tree) -> str:
    """Returns the paths of a tree's arrays, in words."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    return ", ".join(paths) or "no arrays"


def check_has_mesh(mesh, divided: str) -> None:
    """Raises OptimizerError if `create` is to divide a state over no mesh."""
    if mesh is None and divided != "nothing":
        raise OptimizerError(
            f"create: `divided` is {divided!r}, and `mesh` is None; expected the mesh over whose"
            " devices data_parallel divides the state"
        )


def like_in_8_bits(init: Callable, params, old) -> Any:
    """Returns the shapes of an optimizer's state with its moments in 8 bits.

    init: `init(params)` makes such a state.
    params: the parameters, or their shapes.
    old: the optimizer's state with float moments.

    Raises OptimizerError if `old` has its moments in 8 bits already, or has no moments.
    """
    if is_quantized(old):
        raise OptimizerError(
            "quantized_state: the optimizer's state is stored in 8 bits already; expected float"
            " moments: jaxmem.adama(..., moments='float'), or `tx` without jaxmem.quantized"
        )
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    like = jax.eval_shape(init, jax.tree.map(shape, params))
    if not is_quantized(like):
        raise OptimizerError(
            "quantized_state: the optimizer's state has no floating-point array that 8 bits can"
            " store; expected an optimizer with moments, such as jaxmem.adama or optax.adamw"
        )
    return like
