"""Traces the step that `build(plan)` returns, be it a plain function, a jax.jit or an nnx.jit
function.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmem._trace.filtered import Filtered, traced_leaves
from jaxmem._trace.signature import refusal
from jaxmem.errors import JaxmemError, StepError
from jaxmem_kernels import abstract_devices


def trace(build, plan, args: tuple) -> tuple[Any, jax.stages.Traced]:
    """Traces the step, and returns its own stage, to compile, and JAX's, to read.

    The two differ for nnx.jit, and where arguments hold more than arrays. A plain function is
    compiled with its first argument donated.

    Raises StepError if `build` does not return a step, or the step cannot be traced for `args`.
    """
    if not callable(build):
        raise StepError(
            f"plan: `build` is {type(build).__name__}; expected a function of a plan (or None) that"
            " returns the training step"
        )
    if hasattr(build, "trace"):
        raise StepError(
            "plan: `build` is a jitted function; expected a function of a plan (or None) that"
            " returns the training step; a step is jitted inside: jaxmem.auto(jax.jit(step))"
        )
    _check_takes_a_plan(build, plan)
    step = build(plan)
    if not (callable(step) or hasattr(step, "trace")):
        raise StepError(
            f"plan: `build` returned {type(step).__name__}; expected the training step: a function,"
            " jax.jit or nnx.jit of one"
        )
    try:
        return trace_step(step, args)
    except JaxmemError:
        raise
    except Exception as error:
        raise StepError(
            "plan: the step cannot be traced for the arguments given"
            f" ({_shapes(args)}): {described(error)}"
        ) from error


def trace_step(step, args: tuple) -> tuple[Any, jax.stages.Traced]:
    """Traces a step as `trace` does, and raises what tracing raises."""
    jit = jax.jit if all(traced_leaves(args)) else Filtered
    jitted = step if hasattr(step, "trace") else jit(step, donate_argnums=0 if args else ())
    with abstract_devices() if _is_abstract(args) else contextlib.nullcontext():
        stage: Any = jitted.trace(*args)
    return stage, getattr(stage, "traced", stage)  # nnx.jit and `Filtered` wrap JAX's stage


def described(error: BaseException) -> str:
    """Returns type and text of an error that the user's code raised, as Python shows them."""
    # str() of a SyntaxError adds its file and line, which the caller adds itself.
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_takes_a_plan(build, plan) -> None:
    """Raises StepError if `build` cannot be called with a plan."""
    function, before, named = build, (), {}
    if isinstance(build, functools.partial):  # its own signature does not show the missing argument
        function, before, named = build.func, build.args, build.keywords
    if refused := refusal(function, *before, plan, **named):
        signature, error = refused
        name = getattr(function, "__name__", type(function).__name__)
        call = ", ".join([*map(repr, before), "plan", *(f"{key}=..." for key in named)])
        raise StepError(
            f"plan: `build` is {name}{signature}, and cannot be called as {name}({call}): {error};"
            " expected a function of a plan (or None) that returns the training step"
        )


def _is_abstract(args: tuple) -> bool:
    """Whether arguments are sharded over a mesh without devices."""
    meshes = (getattr(getattr(a, "sharding", None), "mesh", None) for a in jax.tree.leaves(args))
    return any(isinstance(mesh, jax.sharding.AbstractMesh) for mesh in meshes)


def _shapes(args) -> str:
    """The shapes of the arguments' leaves for an error, of each argument in 200 characters."""
    leaves = lambda arg: jax.tree_util.tree_leaves_with_path(arg)
    shown = lambda path, a: f"{jax.tree_util.keystr(path)} {getattr(a, 'shape', a)}".lstrip()
    return ", ".join(", ".join(shown(*leaf) for leaf in leaves(arg))[:200] for arg in args)


def with_microbatches(build: Callable, number: int | None) -> Callable:
    """Returns `build` as it is called for a plan of so many microbatches, or `build` itself where
    the plan does not choose their number (None).
    """
    return build if number is None else functools.partial(build, microbatches=number)
