"""How fast the device at hand copies to its host's memory and back."""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

NBYTES = 2**26  # of what is copied: caches hold less
ROUNDS = 5
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@functools.cache
def measured_link() -> tuple[float, float] | None:
    """Bytes a second to the device and to pinned host memory, by the least of several copies each;
    None where the device has no such memory.
    """
    if not any(m.kind == "pinned_host" for m in jax.local_devices()[0].addressable_memories()):
        return None
    here = jax.block_until_ready(jnp.ones(NBYTES // 4, jnp.float32))
    there = jax.block_until_ready(jax.device_put(here, HOST))
    # What is copied is made anew in each run, else XLA hands the argument on as it is.
    to_host = jax.jit(lambda a: jax.device_put(a + 1, HOST))
    to_device = jax.jit(lambda a: jax.device_put(a, DEVICE) + 1)
    plain = _least(jax.jit(lambda a: a + 1), here)
    # A copy takes what a run takes beside its arithmetic, and at least a tenth of that.
    rate = lambda run, a: NBYTES / max(_least(run, a) - plain, 0.1 * plain)
    return rate(to_device, there), rate(to_host, here)


def _least(run: Callable, a) -> float:
    jax.block_until_ready(run(a))
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(a))
        found.append(time.perf_counter() - start)
    return min(found)
