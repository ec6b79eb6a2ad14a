"""Checks that the host has enough free memory for the states that it will store, and that devices
can read the states there.
"""

import math
import os

import jax

from jaxmem._core.bytes import show_bytes
from jaxmem._target.devices.platforms import OnPlatform, platform_of
from jaxmem._target.devices.support import host_loop_fault
from jaxmem._target.devices.target import free_host_bytes
from jaxmem._trace.arguments import shard_bytes
from jaxmem.errors import TargetError

# The variable that limits XLA's pool of pinned host memory on a GPU, and XLA's default limit.
POOL_VARIABLE, POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def check_pool(device: OnPlatform | None, wanted: int) -> None:
    """Raises TargetError unless a device can use `wanted` bytes of its host's memory for states."""
    if not has_host_memory(device) or not wanted:
        return
    assert device is not None
    if (why := host_loop_fault(device)) is not None:
        raise TargetError(
            f"released_step: states of layers are to lie in host memory, and {why}, or leave all"
            " layers in device memory"
        )
    # XLA has read the variable when its backend started: a change now would have no effect.
    text = os.environ.get(POOL_VARIABLE, "")
    limit = (int(text) if text.isdecimal() else POOL_GIB) * 2**30
    if wanted > limit:
        raise TargetError(
            f"released_step: {show_bytes(wanted)} of states are to lie in pinned host memory, and"
            f" XLA's pool there has {show_bytes(limit)}; expected {POOL_VARIABLE} to be at least"
            f" {-(-wanted // 2**30)} when the process starts, or more layers in device memory"
        )


def check_free(wanted: int) -> None:
    """Raises TargetError unless `wanted` bytes of this machine's memory are free now."""
    if wanted > (free := free_host_bytes()):
        raise TargetError(
            f"released_step: {show_bytes(wanted)} more of states are to lie in the memory of this"
            f" machine, and {show_bytes(free)} are free; expected {show_bytes(wanted)}: leave more"
            " layers in the memory of a GPU, or divide the states over the GPUs of several machines"
        )


def nbytes(tree) -> int:
    """Returns the bytes of arrays in this process, summed over its devices. Each device stores a
    part or a copy. The bytes of shapes are counted once.
    """

    def one(a) -> int:
        if isinstance(a, jax.Array):
            return shard_bytes(a) * len(a.sharding.addressable_devices)
        return math.prod(a.shape) * a.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))


def device_of(tree) -> OnPlatform | None:
    """Returns one of the devices that store the arrays; None for shapes."""
    arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    return next(iter(arrays[0].devices())) if arrays else None


def has_host_memory(device: OnPlatform | None) -> bool:
    """Whether a device has host memory apart from its own; False for None, the device of shapes."""
    return device is not None and platform_of(device.platform).host_is_apart
