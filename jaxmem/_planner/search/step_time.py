"""Tells the seconds of whole steps: what a profile prices are the pieces of their blocks."""

import dataclasses
import math

from jaxmem._core.profile import Profile
from jaxmem._cost.profile.doubt import WORTH
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.cost import Cost
from jaxmem._target.devices.target import Target

LEAST_GAIN = 0.002  # the share of a step's time that a change of plan must gain


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Takes what an assignment costs to the seconds of the step under it.

    base: seconds of the step with everything kept.
    source: what tells `base`: "measured" where the step was run, "xla" for XLA's estimate of the
      compiled step, "pieces" for the sum of what its blocks take and of rates for the rest.
    kept: the cost of everything kept.
    uncertainty: the share by which the seconds of pieces may be off.
    """

    base: float
    source: str
    kept: Cost
    uncertainty: float

    def seconds(self, cost: Cost) -> float:
        """Seconds of a step that was not compiled: those of the step with everything kept, and what
        the assignment costs or gains by the profile.
        """
        return max(0.0, self.base + cost.seconds - self.kept.seconds)

    def of(self, trial: Trial) -> float:
        """Seconds of a compiled step: those of a run, or XLA's estimate of it, where `base` is one
        too.
        """
        if self.source == "measured" and trial.measured_seconds is not None:
            return trial.measured_seconds
        if self.source == "xla" and trial.xla_seconds is not None:
            return trial.xla_seconds
        return self.seconds(trial.cost)

    def cautious(self, trial: Trial) -> float:
        """What compiled steps are ranked by: seconds, with lossy codecs at their longest."""
        return self.of(trial) + trial.cost.doubt_seconds

    def uncertain(self, cost: Cost, other: Cost | None = None) -> float:
        """By how many seconds the difference between two steps may be off: the times of all that
        only one of the two does may be, each way.

        other: of the second step; None for the one with everything kept.
        """
        other = self.kept if other is None else other
        apart = math.fsum(
            abs(a - b)
            for a, b in (
                (cost.recompute_seconds, other.recompute_seconds),
                (_moving(cost), _moving(other)),
            )
        )
        return self.uncertainty * apart

    def is_worth_losing(self, lossy: Trial, exact: Trial) -> bool:
        """Whether the lossy plan is faster than the exact one by at least 2 % of the step plus the
        uncertainty of the difference.
        """
        noticed = WORTH * self.base + self.uncertain(lossy.cost, exact.cost)
        return self.of(exact) - self.of(lossy) >= noticed


def _moving(cost: Cost) -> float:
    """Seconds of writing, reading, encoding and transfers."""
    return cost.seconds - cost.recompute_seconds


def step_time_of(profile: Profile, baseline: Trial, target: Target) -> StepTime:
    """The clock of a search, by the best that is known of the step with everything kept."""
    told = {"measured": baseline.measured_seconds, "xla": baseline.xla_seconds}
    told["pieces"] = _sum_of_pieces(profile, baseline, target)
    source, base = next((s, t) for s, t in told.items() if t is not None)
    return StepTime(base, source, baseline.cost, profile.uncertainty)


def _sum_of_pieces(profile: Profile, baseline: Trial, target: Target) -> float:
    """Seconds of a step with everything kept, of which a profile knows the blocks alone."""
    compiled = baseline.step.compiled
    outside = outside_blocks(profile, compiled.matmul_flops, compiled.argument_bytes, target)
    return profile.step_seconds + outside


def outside_blocks(profile: Profile, matmul_flops: float, states: int, target: Target) -> float:
    """Seconds of what stands outside a step's blocks: its matrix products, at the rate of those
    inside, and one reading and writing of the arguments, for the update of the model states.

    matmul_flops: of the products of the whole step.
    states: bytes of the arguments.
    """
    # The rate of products in the blocks, by the profile's own times; without any, the peak rate.
    products = [e for b in profile.blocks for e in b.equations if e.matmuls and e.seconds > 0]
    rate = target.matmul_flops
    if products:
        rate = sum(e.flops for e in products) / sum(e.seconds for e in products)
    others = matmul_flops - sum(b.runs * b.flops for b in profile.blocks)
    return max(0.0, others) / rate + 2 * states / target.bandwidth
