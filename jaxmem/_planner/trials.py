"""What the compiles of one search have told: plans and their bytes, and the memory model fitted to
them.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxmem._core.actions import RECOMPUTE, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.compile import Verified
from jaxmem._solver.cost import Cost, effective
from jaxmem._solver.memory import Key, MemoryModel

# Of a tensor's bytes: recomputed ones live together for a while. Over the plans of
# benchmarks/time_rank, the error of a prediction from everything kept falls from 4.5 to 2.6 % of
# the step at the median.
REPEATED = 1 / 3


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan that was compiled, and what was said of its bytes before."""

    verified: Verified
    cost: Cost
    predicted_bytes: int

    @property
    def actions(self) -> Actions:
        return self.verified.actions

    @property
    def total(self) -> int:
        return self.verified.compiled.total_bytes

    @property
    def host_bytes(self) -> int:
        return self.verified.compiled.host_bytes

    @property
    def working(self) -> int:
        """Bytes that are neither arguments nor saved for the backward: the head's, or one block's."""
        return self.total - self.verified.compiled.argument_bytes - self.cost.saved_bytes


@dataclasses.dataclass
class Evidence:
    """Of one step on one target. `limit` is the budget, `room` what a plan may use of it, in bytes."""

    profile: Profile
    limit: int
    room: int
    host_room: int
    tried: list[Tried] = dataclasses.field(default_factory=list)  # the first keeps everything
    recalled: list[Tried] = dataclasses.field(
        default_factory=list
    )  # of earlier searches, which only guide

    @property
    def baseline(self) -> Tried:
        return self.tried[0]

    @property
    def static(self) -> int:
        """Bytes of the step's arguments, which no action changes."""
        return self.baseline.verified.compiled.argument_bytes

    @property
    def within_budget(self) -> list[Tried]:
        return [t for t in self.tried if t.total <= self.room]

    @property
    def fitting(self) -> list[Tried]:
        return [t for t in self.within_budget if t.host_bytes <= self.host_room]

    def model(self) -> "Expected":
        """Fitted to every compile that is known; the reference is this search's first plan, or an
        earlier one's.
        """
        repeated = repeated_bytes(self.profile)
        known = self.tried + self.recalled
        history = [(t.actions, t.working - _sum(self.profile, repeated, t.actions)) for t in known]
        return Expected(MemoryModel.fit(history, self.profile), repeated)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Working bytes of a plan: what is known of repetition beforehand, and what compiles taught on
    top.
    """

    fitted: MemoryModel
    repeated: Mapping[Key, float]

    @property
    def reference(self) -> float:
        return self.fitted.reference

    @property
    def transients(self) -> dict[Key, int]:
        """By (block, tag, choice), on top of the reference."""
        learned = self.fitted.transients
        keys = learned.keys() | self.repeated.keys()
        sums = {k: learned.get(k, 0.0) + self.repeated.get(k, 0.0) for k in sorted(keys)}
        return _in_whole_units(self.fitted.profile, sums)

    def predict(self, actions: Actions) -> float:
        return self.fitted.predict(actions) + _sum(self.fitted.profile, self.repeated, actions)


def repeated_bytes(profile: Profile) -> dict[Key, int]:
    """What a recomputed tag adds to the working memory of its block's backward, before any compile
    has told.
    """
    sizes = {(b.name, t.name, RECOMPUTE): b.values[t.value] for b in profile.blocks for t in b.tags}
    return _in_whole_units(profile, {key: REPEATED * size for key, size in sizes.items()})


def _in_whole_units(profile: Profile, sizes: Mapping[Key, float]) -> dict[Key, int]:
    """Rounded to what divides all that can be saved, so that the solver counts in the same units as
    before.
    """
    options = [o.device_bytes * b.layers for b in profile.blocks for t in b.tags for o in t.options]
    unit = (
        math.gcd(*options, *(b.layers * b.values[v] for b in profile.blocks for v in b.inputs)) or 1
    )
    return {key: unit * round(size / unit) for key, size in sizes.items()}


def _sum(profile: Profile, by_choice: Mapping[Key, float], actions: Actions) -> float:
    chosen = effective(profile, actions)
    return sum(by_choice.get((b, t, c), 0.0) for b, tags in chosen.items() for t, c in tags.items())
