"""The compiles of one search: plans and their bytes, and the memory model fitted to them."""

import dataclasses
from collections.abc import Sequence

from jaxmem._core.actions import Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.compile import CompiledStep
from jaxmem._solver.cost import Cost
from jaxmem._solver.memory import Expected
from jaxmem._solver.problem import Problem


@dataclasses.dataclass(frozen=True)
class Trial:
    """A plan that was compiled, its price, and what was said of its bytes before."""

    step: CompiledStep
    cost: Cost
    predicted_bytes: int

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
    def working(self) -> int:
        """Bytes that are neither arguments nor saved for the backward: the head's, or one
        block's.
        """
        return self.total - self.step.compiled.argument_bytes - self.cost.saved_bytes


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan may take, in bytes.

    budget: what was asked for.
    room: what of it a plan may use, the rest being left for the device.
    host_room: in host memory.
    """

    budget: int
    room: int
    host_room: int


@dataclasses.dataclass
class Trials:
    """The compiles of one step on one target.

    baseline: the step with everything kept.
    tried: the other plans that this search compiled.
    recalled: those of earlier searches, which only guide.
    """

    profile: Profile
    limits: Limits
    baseline: Trial
    tried: list[Trial] = dataclasses.field(default_factory=list)
    recalled: list[Trial] = dataclasses.field(default_factory=list)

    @property
    def compiled(self) -> list[Trial]:
        """Everything that this search may return."""
        return [self.baseline, *self.tried]

    @property
    def static(self) -> int:
        """Bytes of the step's arguments, which no action changes."""
        return self.baseline.step.compiled.argument_bytes

    @property
    def within_budget(self) -> list[Trial]:
        return [t for t in self.compiled if t.total <= self.limits.room]

    @property
    def fitting(self) -> list[Trial]:
        return [t for t in self.within_budget if t.host_bytes <= self.limits.host_room]

    def model(self) -> Expected:
        """Fitted to every compile that is known."""
        return fitted(self.profile, [*self.compiled, *self.recalled])

    def problem(self, model: Expected, share: float = 1.0) -> Problem:
        """What is left for the solver of `share` of the room, by what the model expects."""
        room = int(self.limits.room * share) - self.static - int(model.reference)
        return Problem(self.profile, room, self.limits.host_room, model.working)


def fitted(profile: Profile, trials: Sequence[Trial]) -> Expected:
    """The memory model of plans that were compiled; the first that has choices is its reference."""
    return Expected.fit([(t.actions, t.working) for t in trials], profile)
