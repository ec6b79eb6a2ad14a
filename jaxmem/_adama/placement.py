"""Where the states of a released step lie: how a state is split, joined, and made in its places."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem._adama.model import Model
from jaxmem._core.bytes import show_bytes
from jaxmem._core.versions import HOST_OFFSETS_SINCE, installed, release
from jaxmem._states import layout
from jaxmem._states.stacks import Stacks, length, parts_of
from jaxmem.errors import OptimizerError, TargetError

# Of XLA's pool of pinned host memory on a GPU: its limit, and the one where none is set.
POOL_VARIABLE, POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def split(model: Model, optimizer, state, persist: int):
    """The state (params, optimizer state) with the states of the first `persist` layers in device
    memory, and those of the others in pinned host memory.
    """
    model.check(state[0])
    layers = [state[0][model.layers], *optimizer.opened(model, *state)[0]]
    count = sum(map(length, parts_of(layers[0])))
    check(persist, count)
    check_host(_platform(state), _nbytes(layers) * (count - persist) // count)
    return _over(model, optimizer, state, lambda layers: layout.split(layers, persist))


def joined(model: Model, optimizer, state):
    """The state with its layers' arrays as one stack each."""
    return _over(model, optimizer, state, layout.joined)


def created(model: Model, optimizer, outer, layer: Callable, count: int, persist: int):
    """The first state (params, optimizer state), in whose places each layer is made on its own.

    outer: the parameters outside the layers.
    layer: `layer(i)`, the parameters of layer i, which is traced.
    count: how many layers there are.
    """
    check(persist, count)
    outer = jax.tree.map(lambda a: layout.moved(jnp.asarray(a), layout.DEVICE), outer)
    one = jax.eval_shape(layer, jax.ShapeDtypeStruct((), jnp.int32))
    model.check({**outer, model.layers: one})
    # Of a model with one layer, of which every array has an axis of layers.
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), one)
    of_one = {**outer, model.layers: shapes}
    like = jax.eval_shape(lambda params: optimizer.init(model, params), of_one)
    stacks = shapes, *optimizer.opened(model, of_one, like)[0]
    check_host(_platform(outer), _nbytes(stacks) * (count - persist))
    # Beside the arrays outside the layers, on the same devices, and whole on each of them.
    where: Any = next(iter(jax.tree.leaves(outer))).sharding

    def stacked(one, make: Callable | None):
        parts = []
        for start, stop, kind in layout.bounds_of(count, persist):
            sharding = NamedSharding(where.mesh, PartitionSpec(), memory_kind=kind)
            shapes = jax.tree.map(
                lambda a, n=stop - start, to=sharding: jax.ShapeDtypeStruct(
                    (n, *a.shape), a.dtype, sharding=to
                ),
                one,
            )
            if make is None:
                parts.append(jax.tree.map(layout.empty, shapes))
            else:
                own = lambda i, first=start, make=make: make(first + i)
                parts.append(layout.filled(shapes, own))
        return parts[0] if len(parts) == 1 else Stacks(tuple(parts))

    params = {**outer, model.layers: stacked(one, layer)}
    return params, optimizer.created(model, outer, layer, stacked)


def check(persist: int, count: int) -> None:
    """Raises OptimizerError unless `persist` is a number of layers, of which there are `count`."""
    if isinstance(persist, bool) or not isinstance(persist, int) or not 0 <= persist <= count:
        raise OptimizerError(
            f"released_step: `persist` is {persist!r}; expected how many layers' states stay in"
            f" device memory, 0 to {count}"
        )


def check_host(platform: str, wanted: int) -> None:
    """Raises an error unless devices of a platform can have so many bytes of states in the memory
    of their host.
    """
    if platform in ("", "cpu") or not wanted:
        return
    version = installed("jaxlib") or "0"
    if release(version) < HOST_OFFSETS_SINCE:
        raise TargetError(
            f"released_step: jaxlib {version} reads a loop's layers in host memory at wrong offsets"
            " on a GPU (fixed in 0.11.1); expected 0.11.1 or later: install it, or leave all layers"
            " in device memory"
        )
    # XLA reads the variable when its backend starts, which it has: a change would be too late.
    text = os.environ.get(POOL_VARIABLE, "")
    limit = (int(text) if text.isdecimal() else POOL_GIB) * 2**30
    if wanted > limit:
        raise TargetError(
            f"released_step: {show_bytes(wanted)} of states are to lie in pinned host memory, and"
            f" XLA's pool there has {show_bytes(limit)}; expected {POOL_VARIABLE} to be at least"
            f" {-(-wanted // 2**30)} when the process starts, or more layers in device memory"
        )


def _nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _platform(tree) -> str:
    """The platform of the devices that arrays lie on, "" of shapes."""
    arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    return next(iter(arrays[0].devices())).platform if arrays else ""


def _over(model: Model, optimizer, state, change: Callable):
    """The state with `change` made of the layers' arrays, and all others beside them."""
    params, old = state
    beside = lambda tree: jax.tree.map(lambda a: layout.moved(a, layout.DEVICE), tree)
    stacks, others, closed = optimizer.opened(model, params, old)
    of = lambda tree: {k: (change if k == model.layers else beside)(v) for k, v in tree.items()}
    return of(params), closed([*map(change, stacks)], beside(others))
