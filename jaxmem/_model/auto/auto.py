"""`jaxmem.auto`: a loss or a step whose layers become blocks, and their tensors tags, as they are
found.
"""

import functools
from collections.abc import Callable

from jaxmem._core.assignment import leaves_as_written
from jaxmem._core.warn import warn
from jaxmem._model.auto.calls import Call, traced
from jaxmem._model.auto.rewriter import Rewriter
from jaxmem._model.auto.step import JittedStep, build_of, planned_step
from jaxmem._model.auto.unseen import made_before
from jaxmem._model.layer.graph import is_inexact
from jaxmem._model.tags.policy import decisions
from jaxmem._trace.rewrite import is_differentiated
from jaxmem.errors import StepError

_BUILD = object()  # `plan` is left out


def auto(function: Callable, plan=_BUILD) -> Callable:
    """`function` with its layers found and decided by `plan`: a loss, or a whole training step.

    `jax.value_and_grad(jaxmem.auto(loss, plan))` needs no tag and no `jax.checkpoint` in the model:
    the loss is traced, its layers are found (each turn of a scan over layers, and the layers of a
    Python loop), and what is worth deciding in them is tagged. A `jax.checkpoint` of the user's own
    is taken away, since the plan decides in its place; blocks under a jaxmem policy, and tags, stay
    as they are.

    `jaxmem.plan(jaxmem.auto(step), state, batch)` plans a step that calls `jax.grad`,
    `jax.value_and_grad` or `jax.vjp` itself, or through a library: what it differentiates becomes
    `auto(loss, plan)` while the step is traced. `jaxmem.auto(step, plan)` runs it.

    function: a loss, or one that returns more beside it, or a step; of arrays, modules and anything
      else. It may change Flax NNX modules. A step may be one of `jax.jit`, and keeps its options.
    plan: a `jaxmem.Plan` or `jaxmem.plans.Assignment`. None, or a plan that leaves the step as it
      is written, returns `function` itself, with the checkpoints that it has of its own. Left out,
      the result is a `build` for `jaxmem.plan`, of the step that `function` is.

    Raises TagError if `plan` is no plan; when the function is called, StepError if no layer is
    found in it, with what was looked at, or if a step differentiates nothing that can be seen, and
    TagError if the plan does not name a layer.
    """
    if not callable(function):
        raise StepError(
            f"auto: `function` is {type(function).__name__}; expected the loss or the step, a"
            " function"
        )
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
        call = traced(function, args, kwargs)
        if is_differentiated(call.closed.jaxpr):
            # A step; or a loss that holds a gradient, of a function without layers. A step of its
            # own tells, since a trace may differ from a run, and a second layer has a second label.
            trial = planned_step(function, decided)
            trial.within(traced, function, args, kwargs)
            if trial.found:
                return step(*args, **kwargs)
            if not _is_loss(call):
                raise trial.no_layers()
            _warn_of_gradients_made_before(function)
        result = rewriter.result(function, call)
        if not rewriter.found and rewriter.error is not None:
            raise rewriter.error
        return result

    if isinstance(step, JittedStep):
        rewritten.trace, rewritten.lower = step.trace, step.lower  # pyright: ignore
    return rewritten


def _warn_of_gradients_made_before(function: Callable) -> None:
    """Warns of them in what is taken for a loss: it may be a step that returns its loss first."""
    if before := made_before(function):
        name = getattr(function, "__name__", type(function).__name__)
        warn(
            f"auto: {name!r} is taken for a loss, and uses {', '.join(before)}, made before, whose"
            " layers are not seen; if it is a step, make the gradient function inside it"
        )


def _is_loss(call: Call) -> bool:
    """Whether `jax.grad` would take the function: its first result is one number."""
    first = next(iter(call.closed.out_avals), None)
    return first is not None and first.shape == () and is_inexact(first)
