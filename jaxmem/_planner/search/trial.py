"""One plan that a search compiled, the limits of a plan, and the price of the step as written.

If the step as written has checkpoints of its own, it is a second baseline and a candidate. The
first choice was to call the step as written "everything kept". Its bytes were then compared with
plans that remove its checkpoints, and `auto(step, plan)` did not run the compiled program. No
assignment of choices to tags describes an author's checkpoints. So `Search.trial_as_written` is
separate from the trials to which the memory model is fitted, and its actions are `AS_WRITTEN`. If
all times are sums of pieces, the step as written is priced between everything kept and full
recomputation, by the FLOPs of its matrix products.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxmem._core.actions import Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.solve.cost import Cost, evaluate
from jaxmem._target.compile.protocol import Backend


@dataclasses.dataclass(frozen=True)
class Trial:
    """A plan that was compiled.

    step: the compiled step.
    cost: the plan's price by the profile.
    predicted_bytes: the prediction of `total` before the compile; `total` itself for everything
      kept, for a compile of an earlier search, and for a change by whole steps.
    gap: the share of the plan's time by which the optimum may be faster, as proven by the solver
      (`ActionSolution.gap`).
    measured_seconds: measured seconds of the step; None if the step was not run.
    """

    step: CompiledStep
    cost: Cost
    predicted_bytes: int
    gap: float = 0.0
    measured_seconds: float | None = None

    @property
    def actions(self) -> Actions:
        return self.step.actions

    @property
    def total(self) -> int:
        return self.step.total

    @property
    def host_bytes(self) -> int:
        return self.step.host_bytes

    @property
    def xla_seconds(self) -> float | None:
        """XLA's estimate of the whole step, plus the seconds of waiting for host transfers, which
        XLA does not price: by the compiled schedule if it is known, else by the profile. None if
        XLA gives no estimate.
        """
        compiled = self.step.compiled
        if compiled.xla_seconds is None:
            return None
        waiting = compiled.host_seconds
        return compiled.xla_seconds + (self.cost.host_seconds if waiting is None else waiting)

    @property
    def working(self) -> int:
        """Bytes that are neither arguments nor saved for the backward: working memory of the head,
        or of one block. The memory model is fitted to these bytes.
        """
        return self.total - self.step.compiled.argument_bytes - self.cost.saved_bytes


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a plan, in bytes.

    budget: the budget that the user requested.
    usable_bytes: the part of the budget that a plan may use; the device needs the rest.
    host_bytes: the bytes that a plan may store in host memory.
    margin: the share of the budget that the device needs.
    """

    budget: int
    usable_bytes: int
    host_bytes: int
    margin: float = 0.0

    @staticmethod
    def on(backend: Backend, budget: int, host_bytes: int) -> "Limits":
        """The limits on a backend, whose margin no plan may use."""
        usable = int(budget * (1 - backend.margin))
        return Limits(budget, usable, host_bytes, backend.margin)

    def budget_for(self, nbytes: int) -> int:
        """The smallest budget whose usable part has room for `nbytes`."""
        near = int(nbytes / (1 - self.margin))
        return next(b for b in range(near, near + 3) if int(b * (1 - self.margin)) >= nbytes)

    def allow(self, step: Trial | CompiledStep) -> bool:
        """Whether a compiled step fits on the device and in host memory."""
        return step.total <= self.usable_bytes and step.host_bytes <= self.host_bytes


class SolvesAndCompiles(Protocol):
    """A search over actions (`Search`), or over placements (`PlacementSearch`)."""

    @property
    def compiles_left(self) -> int: ...

    def compile_solutions(self, solutions: Sequence[Any], /) -> Any:
        """Compiles solutions of the search's problem, and fits its models to the compiled bytes."""


def solve_and_compile(
    search: SolvesAndCompiles, next_solutions: Callable[[], Sequence[Any]]
) -> None:
    """The loop of a search: solves the search's problem by the search's models, compiles the
    solutions, and fits the models to their bytes. The loop ends if no solution is worth a compile,
    or if no compile is left.

    next_solutions: solves the problem; returns no solution to end the loop.
    """
    while search.compiles_left > 0 and (solutions := next_solutions()):
        search.compile_solutions(solutions)


def cost_as_written(profile: Profile, kept: Trial, step: CompiledStep) -> Cost:
    """The cost of a step with checkpoints of its own, from its compiled program.

    The seconds are interpolated between everything kept and full recomputation, by the FLOPs of the
    step's matrix products. The saved bytes are the compiled bytes less the arguments and less the
    working memory of everything kept.

    kept: the step with everything kept.
    step: the step as written.
    """
    nothing = evaluate(profile, profile.everything_recomputed)
    recomputed = sum(b.runs * c.flops for b, c in zip(profile.blocks, nothing.blocks))
    more = step.compiled.matmul_flops - kept.step.compiled.matmul_flops
    share = min(1.0, max(0.0, more / recomputed)) if recomputed else 0.0
    between = lambda least, most: least + share * (most - least)
    exposed = _exposed(profile, step.host_bytes)
    saved = step.total - step.compiled.argument_bytes - kept.working
    return dataclasses.replace(
        nothing,
        saved_bytes=max(0, saved),
        host_bytes=step.host_bytes,
        seconds=between(kept.cost.seconds, nothing.seconds) + exposed,
        recompute_seconds=between(0.0, nothing.recompute_seconds),
        host_seconds=exposed,
    )


def _exposed(profile: Profile, host_bytes: int) -> float:
    """Seconds of transfers to host memory and back that the blocks' work does not hide."""
    if not host_bytes:
        return 0.0
    transfer = host_bytes / profile.link_bytes_per_second
    forward = sum(b.runs * b.forward_seconds for b in profile.blocks)
    backward = sum(b.runs * b.backward_seconds for b in profile.blocks)
    back = transfer * max(b.backwards for b in profile.blocks)
    overlap = profile.overlap
    return max(0.0, transfer - overlap * forward) + max(0.0, back - overlap * backward)
