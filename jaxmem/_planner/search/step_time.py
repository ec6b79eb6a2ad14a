"""The seconds of whole steps. A profile prices only the pieces of a step's blocks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxmem._core.profile import Profile
from jaxmem._cost.profile.doubt import MIN_GAIN_DEFAULT
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.cost import Cost
from jaxmem._target.devices.target import Target

T = TypeVar("T")
LEAST_GAIN = 0.002  # the share of a step's time that a change of plan must gain


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Computes the seconds of a step from the cost of its assignment.

    base: seconds of the step with everything kept.
    source: the source of `base`: "measured" if the step was run; "xla" for XLA's estimate of the
      compiled step; "pieces" for the sum of the seconds of the step's blocks and of the time of the
      other work by the device's rates.
    kept: the cost of everything kept.
    uncertainty: the relative error bound of the seconds of pieces.
    """

    base: float
    source: str
    kept: Cost
    uncertainty: float

    def seconds(self, cost: Cost) -> float:
        """Seconds of a step that was not compiled: the seconds of the step with everything kept,
        plus the difference of the profile's costs.

        Calls of the pieces of a short step may be timed longer than the step. The pieces are then
        scaled to the step, so that no step is predicted to take no time.
        """
        kept = self.kept.seconds
        if kept > self.base:
            return self.base * (cost.seconds / kept)
        return self.base + cost.seconds - kept

    def of(self, trial: Trial) -> float:
        """Seconds of a compiled step: the measured seconds if `base` is measured, or XLA's estimate
        if `base` is an estimate of XLA; else `seconds` of the trial's cost.
        """
        if self.source == "measured" and trial.measured_seconds is not None:
            return trial.measured_seconds
        if self.source == "xla" and trial.xla_seconds is not None:
            return trial.xla_seconds
        return self.seconds(trial.cost)

    def risk_adjusted(self, trial: Trial) -> float:
        """The seconds by which compiled steps are ranked: `of`, with lossy codecs at the upper end
        of their error bounds.
        """
        return self.of(trial) + trial.cost.doubt_seconds

    def uncertainty_of(self, cost: Cost, other: Cost | None = None) -> float:
        """The error bound of the difference between the seconds of two steps, in seconds. Work that
        both steps do has no error in the difference.

        cost, other: the costs of the two steps; `other` is None for the step with everything kept.
        """
        other = self.kept if other is None else other
        recomputing = abs(cost.recompute_seconds - other.recompute_seconds)
        moving = abs(_moving(cost) - _moving(other))
        return self.uncertainty * (recomputing + moving)

    def noticed(self, cost: Cost, other: Cost) -> float:
        """Seconds that a user would notice between two steps: 2 % of the step plus the uncertainty
        of the difference.
        """
        return MIN_GAIN_DEFAULT * self.base + self.uncertainty_of(cost, other)


def worth_its_loss(
    best: T, exact: Sequence[T], seconds: Callable[[T], float], noticed: Callable[[T], float]
) -> T:
    """The lossy plan `best`, or the fastest lossless plan if `best` gains too little.

    exact: the lossless plans. If there is none, `best` is returned.
    seconds: returns the seconds of a plan's step.
    noticed: returns the seconds that `best` must gain over a lossless plan.
    """
    other = min(exact, key=seconds, default=best)
    return best if seconds(other) - seconds(best) >= noticed(other) else other


def _moving(cost: Cost) -> float:
    """Seconds of writing, reading, encoding and transfers."""
    return cost.seconds - cost.recompute_seconds


def step_time_of(profile: Profile, baseline: Trial, target: Target) -> StepTime:
    """The step time of a search, by the best available source for the step with everything kept:
    measured seconds, XLA's estimate, or the sum of pieces.
    """
    seconds = {"measured": baseline.measured_seconds, "xla": baseline.xla_seconds}
    compiled = baseline.step.compiled
    products, arguments = compiled.matmul_flops, compiled.argument_bytes
    seconds["pieces"] = sum_of_pieces(profile, products, arguments, target)
    source, base = next((name, s) for name, s in seconds.items() if s is not None)
    return StepTime(base, source, baseline.cost, profile.uncertainty)


def sum_of_pieces(profile: Profile, matmul_flops: float, states: int, target: Target) -> float:
    """Seconds of the step with everything kept: the profile's seconds of the blocks, and the
    seconds of the work outside the blocks. The arguments are as for `outside_blocks`.
    """
    return profile.step_seconds + outside_blocks(profile, matmul_flops, states, target)


def outside_blocks(profile: Profile, matmul_flops: float, states: int, target: Target) -> float:
    """Seconds of the work outside a step's blocks: the matrix products outside the blocks, at the
    rate of the products in the blocks; and reading and writing the arguments once, for the update
    of the model states.

    matmul_flops: FLOPs of the products of the whole step.
    states: bytes of the arguments.
    """
    # The rate of the products in the blocks, by the profile's times. If no product has a time, the
    # target's peak rate.
    products = [e for b in profile.blocks for e in b.equations if e.matmuls and e.seconds > 0]
    rate = target.matmul_flops
    if products:
        rate = sum(e.flops for e in products) / sum(e.seconds for e in products)
    others = matmul_flops - sum(b.runs * b.flops for b in profile.blocks)
    return max(0.0, others) / rate + 2 * states / target.bandwidth
