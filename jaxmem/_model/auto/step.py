"""A training step that differentiates functions itself, with the layers of these as blocks."""

import functools
from collections.abc import Callable

from jaxmem._core.assignment import Decisions, leaves_as_written
from jaxmem._model.auto.gradients import NAMES, differentiating
from jaxmem._model.auto.rewriter import Rewriter
from jaxmem._model.auto.unseen import innermost, made_before
from jaxmem._model.layer.block import Layer
from jaxmem._model.tags.policy import decisions
from jaxmem.errors import NoLayersError, StepError


def build_of(step: Callable) -> Callable:
    """The function that `jaxmem.plan` takes: from a plan to the step under it, and from None, or a
    plan that leaves the step as it is written, to the step itself.
    """

    def auto(plan, *others):
        if leaves_as_written(plan) and not others:
            return step
        if others or not isinstance(plan, Decisions):
            raise StepError(
                f"auto: called with {type(plan).__name__} where a plan was expected; without a plan"
                " `jaxmem.auto(step)` is for `jaxmem.plan`. To run a step, or to differentiate a"
                " loss, give the plan too: jaxmem.auto(function, plan)"
            )
        return planned_step(step, decisions(plan))

    return auto


def planned_step(
    step: Callable, decided: Decisions, layers: list[Layer] | None = None
) -> "PlannedStep":
    """The step under a plan; one that is jitted keeps what was said to jit. `layers` is where those
    that are found are put, for who wants to see them.
    """
    return (JittedStep if hasattr(step, "trace") else PlannedStep)(step, decided, layers)


class PlannedStep:
    """A step in which every function that it differentiates has its layers as blocks."""

    def __init__(self, step: Callable, decided: Decisions, layers: list[Layer] | None = None):
        """layers: where those that are found are put, for who wants to see them."""
        self._step = step
        self._rewriter = Rewriter(decided, layers)
        functools.update_wrapper(self, step, updated=())

    @property
    def found(self) -> bool:
        """Whether a layer was found until now."""
        return self._rewriter.found

    def __call__(self, *args, **kwargs):
        return self._checked(self._step, args, kwargs)

    def within(self, function: Callable, *args, **kwargs):
        """Calls `function`, with the gradients that it takes being those of the planned step."""
        names = getattr(innermost(self._step), "__globals__", {})
        with differentiating(self._rewriter.with_blocks, names, look=not self.found):
            return function(*args, **kwargs)

    def _checked(self, function: Callable, args: tuple, kwargs: dict):
        """Calls the step, or what traces it. Raises NoLayersError if no layer is found in it."""
        result = self.within(function, *args, **kwargs)
        if not self.found:
            raise self.no_layers()
        return result

    def no_layers(self) -> NoLayersError:
        """The error of a step in which no layer was found."""
        if self._rewriter.error is not None:
            return self._rewriter.error
        name = getattr(self._step, "__name__", type(self._step).__name__)
        before = made_before(self._step)
        made = f": it uses {', '.join(before)}" if before else ""
        return NoLayersError(
            f"auto: {name!r} called none of {', '.join(f'jax.{n}' for n in NAMES)} while it was"
            f" traced. A gradient function that was made before is not seen{made}. Make it inside"
            " the step, as in `gradients = jax.grad(loss)(params, batch)`; or let it differentiate"
            " jaxmem.auto(loss, plan), in a `build` that is given the plan"
        )


class JittedStep(PlannedStep):
    """A step of `jax.jit` or `nnx.jit`, which is traced and lowered as before."""

    def trace(self, *args, **kwargs):
        return self._checked(self._step.trace, args, kwargs)  # pyright: ignore

    def lower(self, *args, **kwargs):
        return self._checked(self._step.lower, args, kwargs)  # pyright: ignore
