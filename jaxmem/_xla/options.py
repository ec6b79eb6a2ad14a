"""What XLA is asked for beside a step: to hide what crosses in its loops behind their work."""

from typing import Any

import jax

from jaxmem._jax.arguments import on_host
from jaxmem._jax.jaxpr import subjaxprs

HIDING = "xla_gpu_enable_latency_hiding_scheduler"
SHARED_TUNING = "xla_gpu_shard_autotuning"
LOOPS = ("scan", "while")


def options_of(platform: str, traced: jax.stages.Traced) -> dict[str, Any]:
    """XLA's compile options for a step: its scheduler that hides latencies, where loops copy to
    host memory or from it, or gather between devices what they multiply.

    Left to itself XLA takes that scheduler for GPUs of which it has a list of prices (Hopper and
    later), and waits for each copy on others. It takes more of temporaries, so that it is
    asked for where something crosses alone. Copies outside of loops are none of these: layers
    that follow each other without a loop then keep on the device what they offload.
    """
    jaxpr = traced.jaxpr.jaxpr
    crosses = platform == "cuda" and (_copies(jaxpr, in_loop=False) or _gathers(jaxpr))
    return {HIDING: True} if crosses else {}


def tuned_alone(platform: str) -> dict[str, Any]:
    """XLA's compile options with which one of several processes compiles a step of all of them.

    XLA:GPU divides the tuning of such a step's kernels among the processes, and each waits for the
    others' results. While the first process plans, the others compile nothing.
    """
    return {SHARED_TUNING: False} if platform == "cuda" and jax.process_count() > 1 else {}


def _gathers(jaxpr) -> bool:
    """Whether a loop of the program gathers beside matrix products."""
    loops = (e for e in _equations(jaxpr) if e.primitive.name in LOOPS)
    names = (
        {e.primitive.name for inner in subjaxprs(loop) for e in _equations(inner)} for loop in loops
    )
    return any({"all_gather", "dot_general"} <= found for found in names)


def _equations(jaxpr):
    """All equations, of every depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from _equations(inner)


def _copies(jaxpr, in_loop: bool) -> bool:
    """Whether a loop of the program reads or makes an array in host memory."""
    for eqn in jaxpr.eqns:
        hosted = any(on_host(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if in_loop and hosted:
            return True
        inside = in_loop or eqn.primitive.name in LOOPS
        if any(_copies(inner, inside) for inner in subjaxprs(eqn)):
            return True
    return False
