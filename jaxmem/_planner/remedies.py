"""Says what would make a step's arguments smaller, and by how many bytes, where they alone exceed a
budget.
"""

import jax
import jax.numpy as jnp

from jaxmem._core.bytes import show_bytes
from jaxmem._trace.arguments import divisors, on_host
from jaxmem._trace.jaxpr import nbytes

DEVICES = 8  # that states are divided over in the example, where the target is one device
# How optimizers call their moments, as attributes or keys of their states.
MOMENTS = frozenset(
    {"m", "v", "mu", "nu", "trace", "momentum", "velocity", "exp_avg", "exp_avg_sq"}
)


def remedies(traced: jax.stages.Traced, args: tuple, devices: int) -> str:
    """What jaxmem can do, as the end of a sentence: each with the bytes of one device that it
    spares; "" where no argument is donated, so that none is known as model state.

    traced, args: the step, and what it was traced for.
    devices: how many the target has.
    """
    states = moments = 0
    infos = jax.tree.leaves_with_path(traced.args_info)
    for (path, info), aval, parts in zip(infos, traced.jaxpr.in_avals, divisors(traced, args)):
        if not info.donated or on_host(aval) or not jnp.issubdtype(aval.dtype, jnp.floating):
            continue
        size = nbytes(aval) // (parts or 1)
        states += size
        if _names(path) & MOMENTS and aval.dtype.itemsize >= 4:
            moments += size
    if not states:
        return ""
    count = devices if devices > 1 else DEVICES
    found = [
        "a jaxmem.released_step planned with decide=('actions', 'states') keeps states of layers in"
        f" host memory: up to {show_bytes(states)} less",
        f"its data_parallel divides states over {count} devices: up to"
        f" {show_bytes(states - states // count)} less",
    ]
    if moments:
        found.append(f"moments in bfloat16: {show_bytes(moments // 2)} less")
    found.append("more microbatches: 0 B less, since they divide saved tensors and no arguments")
    return "; ".join(found)


def _names(path) -> set[str]:
    """The attributes and keys of a path, as texts."""
    return {str(getattr(key, "name", getattr(key, "key", ""))) for key in path}
