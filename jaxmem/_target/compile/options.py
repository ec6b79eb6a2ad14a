"""XLA's compile options for a step: the scheduler that overlaps copies of its arguments, and copies
and collectives of its loops, with compute.
"""

import os
from collections.abc import Iterator
from typing import Any

import jax

from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import on_host
from jaxmem._trace.jaxpr import JaxprEqn, equations, inside
from jaxmem._trace.step import trace_step
from jaxmem.errors import StepError

HIDING = "xla_gpu_enable_latency_hiding_scheduler"
GRAPHED = "xla_gpu_enable_command_buffer"
# Remove with a fix: XLA's default in JAX 0.11 without DYNAMIC_SLICE_FUSION and
# DYNAMIC_SLICE_COPY_FUSION.
WITHOUT_COPIES = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"
SHARED_TUNING = "xla_gpu_shard_autotuning"
LOOPS = ("scan", "while")


def compiler_options(step, *args, target: str | Target = "local") -> dict[str, Any]:
    """Returns XLA's compile options for a training step that is compiled without a plan.

        options = jaxmem.plans.compiler_options(step, state, batch)
        jax.jit(step, donate_argnums=0, compiler_options=options)

    The options request XLA's latency-hiding scheduler for a step with arguments in host memory,
    such as a released step after `split`, for a step whose loops copy arrays between host memory
    and a GPU, and for a step whose loops gather arrays between GPUs. Without the options, GPUs
    before Hopper wait for each of these copies. For a step that copies to host memory, the options
    also keep the copies out of CUDA graphs, in which kernels wait for each copy. The dict is empty
    for other steps, and for CPUs and TPUs. JAX reads the options of the outermost `jax.jit` only.
    The step of a plan has the same options as `Plan.compiler_options`.

    step: the training step, a function or a `jax.jit` of one; it is traced and not compiled.
    args: the step's arguments: arrays, modules or `jax.ShapeDtypeStruct`s, where they will be
      stored when the step is called.
    target: the device that the step is compiled for, as for `jaxmem.plan`.

    Raises StepError if `step` is not callable, TargetError for an unknown target, and the
    errors that the step itself raises for these arguments.
    """
    if not callable(step):
        raise StepError(
            f"compiler_options: `step` is {type(step).__name__}; expected the training step: a"
            " function, jax.jit or nnx.jit of one; pass the step that `build(None)` returns"
        )
    return options_of(Target.parse(target).platform, trace_step(step, args)[1])


def options_of(platform: str, traced: jax.stages.Traced) -> dict[str, Any]:
    """XLA's compile options for a step: its scheduler that hides latencies, where arguments are in
    host memory, where loops copy to host memory or from it, or gather between devices what they
    multiply.

    By default XLA uses this scheduler for GPUs with a table of prices (Hopper and later), and waits
    for each copy on other GPUs. The scheduler needs more bytes for temporaries, so that it is
    requested only if arguments are in host memory, or a loop transfers arrays. Other copies
    outside of loops do not count: layers that follow each other without a loop would then keep
    their offloaded tensors on the device.

    XLA records kernels and copies as CUDA graphs. On an H200, a graph ran copies and kernels one
    after the other, so that copies of slices are left out of the graphs, unless `XLA_FLAGS` says
    what is in graphs.
    """
    if platform != "cuda":
        return {}
    jaxpr = traced.jaxpr.jaxpr
    if _copies(jaxpr) or any(map(on_host, traced.jaxpr.in_avals)):
        chosen = GRAPHED in os.environ.get("XLA_FLAGS", "")  # by the user
        return {HIDING: True} | ({} if chosen else {GRAPHED: WITHOUT_COPIES})
    return {HIDING: True} if _gathers(jaxpr) else {}


def tuned_alone(platform: str) -> dict[str, Any]:
    """XLA's compile options with which one of several processes compiles a step of all of them.

    XLA:GPU divides the tuning of such a step's kernels among the processes, and each waits for the
    others' results. While the first process plans, the others compile nothing.
    """
    return {SHARED_TUNING: False} if platform == "cuda" and jax.process_count() > 1 else {}


def _gathers(jaxpr) -> bool:
    """Whether a loop of the program both gathers arrays and has matrix products."""
    names = ({e.primitive.name for e in inside(loop)} for loop in _loops(jaxpr))
    return any({"all_gather", "dot_general"} <= found for found in names)


def _copies(jaxpr) -> bool:
    """Whether a loop of the program reads or makes an array in host memory."""
    within = (eqn for loop in _loops(jaxpr) for eqn in inside(loop))
    return any(on_host(v.aval) for eqn in within for v in (*eqn.invars, *eqn.outvars))


def _loops(jaxpr) -> Iterator[JaxprEqn]:
    """Yields the loops of a program, at any depth."""
    return (eqn for eqn in equations(jaxpr) if eqn.primitive.name in LOOPS)
