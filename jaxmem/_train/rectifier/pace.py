"""What steps take by the clock, under the plan that runs and the one before it."""

import dataclasses
import statistics
from typing import Any

from jaxmem._result.plan.plan import Plan

SETTLED = 20  # steps under a plan after which its median is believed
NOISE = 0.01  # share of a step's seconds by which its median may be off
SLOWER = 0.02  # share by which the steps of a new plan must be slower for the old one to come back


class StepTimes:
    """What steps take by the clock against what their plan says.

    seconds: those of the steps under the plan, the first aside.
    """

    def __init__(self):
        self.seconds: list[float] = []

    def told(self, seconds: float) -> None:
        self.seconds.append(seconds)

    @property
    def median(self) -> float | None:
        """None before enough steps were timed."""
        return statistics.median(self.seconds) if len(self.seconds) >= SETTLED else None

    @property
    def noise(self) -> float:
        """Seconds by which the median may be off, of enough steps."""
        lower, _, upper = statistics.quantiles(self.seconds, n=4)
        return NOISE * upper + (upper - lower) / len(self.seconds) ** 0.5

    def of(self, plan: Plan) -> float:
        """By how much steps take longer than predicted; 1 where too few were timed."""
        if self.median is None or plan.predicted_seconds <= 0:
            return 1.0
        return self.median / plan.predicted_seconds


@dataclasses.dataclass(frozen=True)
class Before:
    """What a plan took the place of.

    plan, step: it, and what runs it, where that is known.
    pace: what its steps took.
    for_speed: whether the other was taken since it is faster.
    """

    plan: Plan
    step: Any
    pace: StepTimes
    for_speed: bool
