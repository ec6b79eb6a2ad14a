"""`jaxmem.auto`: finds the layers of a loss or of a training step, and makes the layers blocks."""

import functools
from collections.abc import Callable

from jaxmem._core.assignment import leaves_as_written
from jaxmem._core.warn import warn
from jaxmem._model.auto.calls import traced
from jaxmem._model.auto.gradients import made_before
from jaxmem._model.auto.step import JittedStep, Rewriter, build_of, planned_step
from jaxmem._model.layer.graph import is_inexact
from jaxmem._model.tags.policy import decisions
from jaxmem._trace.jaxpr import ClosedJaxpr
from jaxmem._trace.rewrite import is_differentiated
from jaxmem.errors import StepError

_BUILD = object()  # `plan` is left out


def auto(function: Callable, plan=_BUILD) -> Callable:
    """Returns a loss or a training step whose layers jaxmem finds and a plan decides.

    `auto` traces the function, makes each layer a block, and tags the tensors that a plan should
    decide about. A layer is an iteration of a scan over layers, or one of the equal layers of a
    Python loop. The model needs no tag and no `jax.checkpoint`. A `jax.checkpoint` without a jaxmem
    policy is removed, because the plan decides in its place; beside layers it becomes a block.
    Blocks under `jaxmem.remat_policy` and existing tags stay unchanged.

    For a loss, differentiate the returned function: `jax.value_and_grad(jaxmem.auto(loss, plan))`.

    For a step, `jaxmem.plan(jaxmem.auto(step), state, batch)` makes a plan, and
    `jaxmem.auto(step, plan)` is the step under the plan. The step calls `jax.grad`,
    `jax.value_and_grad`, `jax.vjp`, `jax.jacrev` or `jax.linearize`, directly or through a library.
    While the step is traced, jaxmem replaces each function that the step differentiates by `auto`
    of that function.

    function: a loss, a loss that also returns auxiliary values, or a training step. Arguments and
      results may be arrays, modules or any other objects. The function may change Flax NNX modules.
      A step may be a `jax.jit` or `nnx.jit` function, and keeps the options of its jit.
    plan: a `jaxmem.Plan` or a `jaxmem.plans.Assignment`. For None, and for a plan that leaves the
      step as written, `auto` returns `function` itself, with its own checkpoints. Without this
      argument, `auto` returns a function `build` for `jaxmem.plan`.

    Raises StepError if `function` is not callable, and TagError if `plan` is not a plan. When
    called, the returned function raises NoLayersError if jaxmem finds no layer; the message names
    the loops that were examined. It raises NoLayersError also if a step calls none of these
    gradient functions while it is traced, and TagError if the plan does not name a layer.
    """
    if not callable(function):
        raise StepError(
            f"auto: `function` is {type(function).__name__}; expected the loss or the step, a"
            " function"
        )
    function = getattr(function, "unplanned", function)  # of `jaxmem.jit`
    if plan is _BUILD:
        return build_of(function)
    decided = decisions(plan)
    if leaves_as_written(plan):
        return function
    rewriter, step = Rewriter(decided), planned_step(function, decided)

    @functools.wraps(function, updated=())
    def rewritten(*args, **kwargs):
        if step.found:
            return step(*args, **kwargs)
        closed, call = traced(function, args, kwargs)
        if is_differentiated(closed.jaxpr):
            # A step; or a loss that differentiates a function without layers. A separate planned
            # step finds out, since a trace may differ from a run, and since every layer that is
            # found takes a new label.
            trial = planned_step(function, decided)
            trial.within(traced, function, args, kwargs)
            if trial.found:
                return step(*args, **kwargs)
            if not _is_loss(closed):
                raise trial.no_layers()
            _warn_of_gradients_made_before(function)
        result = rewriter.result(function, closed, call)
        if not rewriter.found and rewriter.error is not None:
            raise rewriter.error
        return result

    if isinstance(step, JittedStep):
        rewritten.trace, rewritten.lower = step.trace, step.lower  # pyright: ignore
    return rewritten


def _warn_of_gradients_made_before(function: Callable) -> None:
    """Warns if a function that is taken for a loss uses gradient functions that were made before:
    it may be a step that returns its loss first.
    """
    if before := made_before(function):
        name = getattr(function, "__name__", type(function).__name__)
        warn(
            f"auto: {name!r} is taken for a loss, and uses {', '.join(before)}, made before, whose"
            " layers are not seen; if it is a step, make the gradient function inside it"
        )


def _is_loss(closed: ClosedJaxpr) -> bool:
    """Whether `jax.grad` would accept the function: its first result is a floating-point scalar."""
    first = next(iter(closed.out_avals), None)
    return first is not None and first.shape == () and is_inexact(first)
