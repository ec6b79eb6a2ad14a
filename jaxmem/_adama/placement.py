"""Where the states of a released step lie: how a state is split, joined, and made in its places."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem._adama.model import Model
from jaxmem._adama.transform import AdamA, AdamAState
from jaxmem._core.bytes import show_bytes
from jaxmem._core.versions import HOST_OFFSETS_SINCE, installed, release
from jaxmem._device.target import free_host_bytes
from jaxmem._states import layout
from jaxmem._states.stacks import Stacks, length, parts_of
from jaxmem.errors import OptimizerError, TargetError

# Of XLA's pool of pinned host memory on a GPU: its limit, and the one where none is set.
POOL_VARIABLE, POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def split(model: Model, state, persist: int):
    """The state (params, AdamAState) with the states of the first `persist` layers in device
    memory, and those of the others in pinned host memory.
    """
    model.check(state[0])
    layers = [
        state[0][model.layers],
        *(moments[model.layers] for moments in (state[1].mu, state[1].nu)),
    ]
    count = sum(map(length, parts_of(layers[0])))
    check(persist, count)
    wanted, platform = _nbytes(layers) * (count - persist) // count, _platform(state)
    check_host(platform, wanted)
    # On a CPU both memories are one, and what lies in one of them needs no more in the other.
    if platform not in ("", "cpu"):
        there = [a for a in jax.tree.leaves(layers) if a.sharding.memory_kind == layout.HOST]
        check_free(wanted - _nbytes(there))
    return _over(model, state, lambda layers: layout.split(layers, persist))


def joined(model: Model, state):
    """The state with its layers' arrays as one stack each."""
    return _over(model, state, layout.joined)


def created(model: Model, tx: AdamA, outer, layer: Callable, count: int, persist: int):
    """The first state (params, AdamAState), in whose places each layer is made on its own.

    outer: the parameters outside the layers.
    layer: `layer(i)`, the parameters of layer i, which is traced.
    count: how many layers there are.
    """
    check(persist, count)
    on_device = lambda tree: jax.tree.map(lambda a: layout.moved(a, layout.DEVICE), tree)
    outer = on_device(jax.tree.map(jnp.asarray, outer))
    one = jax.eval_shape(layer, jax.ShapeDtypeStruct((), jnp.int32))
    model.check({**outer, model.layers: one})
    like = jax.eval_shape(tx.init, one)
    # Beside the arrays outside the layers, on the same devices, and whole on each of them.
    where: Any = next(iter(jax.tree.leaves(outer))).sharding
    platform = _platform(outer)
    wanted = _nbytes((one, like.mu, like.nu)) * len(where.addressable_devices)
    check_host(platform, wanted * (count - persist))
    check_free(wanted * (count if platform == "cpu" else count - persist))
    params, mu, nu = [], [], []
    for start, stop, kind in layout.bounds_of(count, persist):
        sharding = NamedSharding(where.mesh, PartitionSpec(), memory_kind=kind)
        shapes = lambda tree, n=stop - start, to=sharding: jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((n, *a.shape), a.dtype, sharding=to), tree
        )
        params.append(layout.filled(shapes(one), lambda i, first=start: layer(first + i)))
        mu.append(jax.tree.map(layout.empty, shapes(like.mu)))
        nu.append(jax.tree.map(layout.empty, shapes(like.nu)))
    together = lambda parts: parts[0] if len(parts) == 1 else Stacks(tuple(parts))
    with_layers = lambda outer, parts: {**outer, model.layers: together(parts)}
    first = on_device(tx.init(outer))
    return with_layers(outer, params), first._replace(
        mu=with_layers(first.mu, mu), nu=with_layers(first.nu, nu)
    )


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


def check_free(wanted: int) -> None:
    """Raises TargetError unless so many bytes of this machine's memory are free now."""
    if wanted > (free := free_host_bytes()):
        raise TargetError(
            f"released_step: {show_bytes(wanted)} more of states are to lie in the memory of this"
            f" machine, and {show_bytes(free)} are free; expected {show_bytes(wanted)}: leave more"
            " layers in the memory of a GPU, or divide the states over the GPUs of several machines"
        )


def _nbytes(tree) -> int:
    """Bytes of arrays on the devices of this process, a part or a copy on each; those of shapes
    once.
    """

    def one(a) -> int:
        here = isinstance(a, jax.Array)
        shape = a.sharding.shard_shape(a.shape) if here else a.shape
        copies = len(a.sharding.addressable_devices) if here else 1
        return math.prod(shape) * a.dtype.itemsize * copies

    return sum(map(one, jax.tree.leaves(tree)))


def _platform(tree) -> str:
    """The platform of the devices that arrays lie on, "" of shapes."""
    arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    return next(iter(arrays[0].devices())).platform if arrays else ""


def _over(model: Model, state, change: Callable):
    """The state with `change` made of the layers' arrays, and all others beside them."""
    params, old = state
    beside = lambda tree: jax.tree.map(lambda a: layout.moved(a, layout.DEVICE), tree)
    of = lambda tree: {k: (change if k == model.layers else beside)(v) for k, v in tree.items()}
    return of(params), AdamAState(beside(old.count), beside(old.folded), of(old.mu), of(old.nu))
