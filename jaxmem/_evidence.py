"""What the compiles of one search have told: plans and their bytes, and the memory model fitted to them."""

import dataclasses

from jaxmem._evaluate import Cost
from jaxmem._memory_model import MemoryModel
from jaxmem._types import Actions, Profile
from jaxmem._verify import Verified


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


@dataclasses.dataclass
class Evidence:
    """Of one step on one target. `limit` is the budget, `room` what a plan may use of it, in bytes."""

    profile: Profile
    limit: int
    room: int
    host_room: int
    tried: list[Tried] = dataclasses.field(default_factory=list)  # the first keeps everything

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

    def working(self, tried: Tried) -> int:
        """Bytes that are neither arguments nor saved for the backward: the head's, or one block's."""
        return tried.total - self.static - tried.cost.saved_bytes

    def model(self) -> MemoryModel:
        return MemoryModel.fit([(t.actions, self.working(t)) for t in self.tried], self.profile)
