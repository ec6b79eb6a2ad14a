"""One plan that a search compiled, and what it may take."""

import dataclasses

from jaxmem._core.actions import Actions
from jaxmem._planner.solve.cost import Cost
from jaxmem._planner.trials.compile import CompiledStep


@dataclasses.dataclass(frozen=True)
class Trial:
    """A plan that was compiled.

    step: what it compiled to.
    cost: its price by the profile.
    predicted_bytes: what was said of its total before the compile.
    gap: by what share the optimum may be faster, where the solver's time ran out (`Solution.gap`).
    measured_seconds: those of the step where it was run; None where it was not.
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
        return self.step.compiled.total_bytes

    @property
    def host_bytes(self) -> int:
        return self.step.compiled.host_bytes

    @property
    def xla_seconds(self) -> float | None:
        """XLA's estimate of the whole step, and the copies to host memory that it does not price;
        None where XLA says nothing.
        """
        seconds = self.step.compiled.xla_seconds
        return None if seconds is None else seconds + self.cost.host_seconds

    @property
    def working(self) -> int:
        """Bytes that are neither arguments nor saved for the backward: working memory of the head,
        or of one block. It is what the memory model is fitted to.
        """
        return self.total - self.step.compiled.argument_bytes - self.cost.saved_bytes


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan may take, in bytes.

    budget: what was asked for.
    room: the part of the budget that a plan may use; the rest is left for the device.
    host_room: what may lie in host memory.
    """

    budget: int
    room: int
    host_room: int

    def allow(self, trial: Trial) -> bool:
        """Whether it fits on the device and in host memory."""
        return trial.total <= self.room and trial.host_bytes <= self.host_room
