"""The facts for a decision about another plan: outliers beyond the capacity of codecs, seconds that
another plan could save, and measured seconds of steps.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmem._core.actions import Actions
from jaxmem._core.groups import group_label, ranges, ungrouped
from jaxmem._model.codecs.outlier import OutlierSeparated
from jaxmem._model.codecs.registry import parse
from jaxmem._result.plan.difference import difference
from jaxmem._result.plan.plan import Plan
from jaxmem._train.rectifier.counts import Counts

SETTLED = 20  # steps under a plan after which the median of their seconds is used
NOISE = 0.01  # error bound of the median, as a share of a step's seconds
SLOWER = 0.02  # the previous plan returns if steps are slower by more than this share


def rooms(counts: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    """The capacity that the codec of each tag needs for these counts."""
    of = OutlierSeparated().with_room_for
    return {(b, t): of(n).capacity for b, tags in counts.items() for t, n in tags.items()}


def rooms_of(
    actions: Actions, several: Sequence[Counts]
) -> Iterator[tuple[str, str, int, list[int]]]:
    """The codecs of an assignment that separate outliers: block, tag and capacity of each, and the
    counts of its layers that exceed the capacity.

    several: the counts of several steps. In each, the tensors of a tag are ordered by microbatch,
      and by layer in each microbatch.
    """
    for label, choices in actions.items():
        block = ungrouped(label)
        groups = {group_label(block, *group): group for group in ranges(actions, block)}
        start, stop, *_ = groups.get(label, (0, 1))
        layers = max((end for _, end, *_ in groups.values()), default=1)
        for tag, choice in choices.items():
            codec = None if choice.codec is None else parse(choice.codec)
            room = None if codec is None else codec.capacity
            if room is not None:
                of_tag = [counts.get(block, {}).get(tag, ()) for counts in several]
                tensors = [(i % layers, n) for numbers in of_tag for i, n in enumerate(numbers)]
                yield block, tag, room, [n for i, n in tensors if start <= i < stop and n > room]


def overflows(actions: Actions, several: Sequence[Counts]) -> list[str]:
    """A sentence for each tag whose codec has a smaller capacity than its tensors have outliers."""
    found = {}
    for block, tag, room, beyond in rooms_of(actions, several):
        if beyond:
            found[block, tag] = f"{block}/{tag} has {max(beyond)} outliers and room for {room}"
    return list(found.values())


def without_room(actions: Actions, counts: Counts) -> int:
    """Number of outlier channels of all tensors that codecs quantize with the other channels."""
    return sum(n - room for *_, room, beyond in rooms_of(actions, [counts]) for n in beyond)


def most_gained(plan: Plan) -> float:
    """Predicted seconds of a step that another plan could save at most: the difference from the
    fastest plan of the curve.
    """
    fastest = min((p.seconds for p in plan.points), default=plan.baseline_seconds)
    return max(0.0, plan.predicted_seconds - min(fastest, plan.baseline_seconds))


def planning_seconds(plan: Plan) -> float:
    """Seconds that it took to make the plan, as an estimate for another plan."""
    return plan.profile_seconds + plan.solve_seconds + plan.compile_seconds


def changed(plan: Plan, other: Plan) -> dict[str, str]:
    """The choices that differ: block/tag -> "this -> that"."""
    pairs = sorted(difference(plan, other).actions.items())
    return {f"{b}/{t}": f"{was or 'absent'} -> {now or 'absent'}" for (b, t), (was, now) in pairs}


def identity(plan: Plan) -> list:
    """The values by which a checkpoint recognizes the plan that a run began with, as JSON."""
    return [plan.fingerprint, plan.target, plan.budget_bytes, plan.microbatches, plan.batch]


class StepTimes:
    """Measured seconds of the steps under one plan.

    plan, step: the plan and its step function (None if it has none).
    seconds: one value for each step after the first.
    """

    def __init__(self, plan: Plan, step: Any = None):
        self.plan, self.step = plan, step
        self.seconds: list[float] = []

    def told(self, seconds: float) -> None:
        self.seconds.append(seconds)

    @property
    def median(self) -> float | None:
        """The median; None before enough steps were measured."""
        return statistics.median(self.seconds) if len(self.seconds) >= SETTLED else None

    @property
    def noise(self) -> float:
        """Uncertainty of the median in seconds. Needs enough steps."""
        lower, _, upper = statistics.quantiles(self.seconds, n=4)
        return NOISE * upper + (upper - lower) / len(self.seconds) ** 0.5

    @property
    def ratio(self) -> float:
        """Ratio of the measured to the predicted step time; 1 if too few steps were measured."""
        predicted = self.plan.predicted_seconds
        return 1.0 if self.median is None or predicted <= 0 else self.median / predicted
