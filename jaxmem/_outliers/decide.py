"""What speaks for another plan, and against it: numbers of a decision, and the decision itself."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from jaxmem._codecs.outlier import OutlierSeparated
from jaxmem._codecs.registry import parse
from jaxmem._core.actions import Actions
from jaxmem._core.labels import ungrouped
from jaxmem._plan.plan import Plan

Counts = Mapping[str, Mapping[str, int]]
SETTLED = 20  # steps under a plan after which its median is believed
NOISE = 0.01  # share of a step's seconds by which its median may be off
SLOWER = 0.02  # share by which the steps of a new plan must be slower for the old one to come back


@dataclasses.dataclass(frozen=True)
class Overflow:
    """A tag of which a plan's codec has less room than its tensors have outlier channels."""

    block: str
    tag: str
    capacity: int
    count: int

    def __str__(self) -> str:
        return f"{self.block}/{self.tag} has {self.count} outliers and room for {self.capacity}"


def rooms(counts: Counts) -> dict[tuple[str, str], int]:
    """The room that each tag's codec would be given for these counts."""
    of = OutlierSeparated().with_room_for
    return {(b, t): of(n).capacity for b, tags in counts.items() for t, n in tags.items()}


def greatest(several: Sequence[Counts]) -> dict[str, dict[str, int]]:
    """The greatest of several counts, tag by tag."""
    found: dict[str, dict[str, int]] = {}
    for counts in several:
        for block, tags in counts.items():
            for tag, count in tags.items():
                of = found.setdefault(block, {})
                of[tag] = max(of.get(tag, 0), count)
    return found


def capacities(actions: Actions) -> dict[tuple[str, str], int]:
    """The room of each codec that separates outliers, by block and tag: the least where groups of a
    block's layers have several.
    """
    found: dict[tuple[str, str], int] = {}
    for label, choices in actions.items():
        for tag, choice in choices.items():
            codec = None if choice.codec is None else parse(choice.codec)
            if isinstance(codec, OutlierSeparated):
                key = ungrouped(label), tag
                found[key] = min(found.get(key, codec.capacity), codec.capacity)
    return found


def overflows(actions: Actions, counts: Counts) -> list[Overflow]:
    """The tags whose outliers a plan's codecs have no room for."""
    return [
        Overflow(block, tag, room, count)
        for (block, tag), room in capacities(actions).items()
        if (count := counts.get(block, {}).get(tag, 0)) > room
    ]


class Pace:
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


def most_gained(plan: Plan) -> float:
    """Seconds a step by which another plan of the same step could be faster at most, as predicted:
    down to the fastest of all bytes.
    """
    fastest = min((p.seconds for p in plan.points), default=plan.baseline_seconds)
    return max(0.0, plan.predicted_seconds - min(fastest, plan.baseline_seconds))


def planning_seconds(plan: Plan) -> float:
    """What making the plan took: what another one may take too."""
    return plan.profile_seconds + plan.solve_seconds + plan.compile_seconds
