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
    """A plan that was compiled.

    step: what it compiled to.
    cost: its price by the profile.
    predicted_bytes: what was said of its total before the compile.
    """

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


@dataclasses.dataclass
class Trials:
    """The compiles of one step on one target.

    profile: the step, with its layers undivided.
    limits: what a plan may take.
    baseline: the step with everything kept. If it is from an earlier search, it does not fit.
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

    def predicted(self, beside: float) -> int:
        """The bytes to tell of a step that takes `beside` bytes beside its arguments by the model,
        which may be less than nothing for plans unlike those that it was fitted to.
        """
        return self.static + max(0, int(beside))

    @property
    def within_budget(self) -> list[Trial]:
        """What fits on the device, whether its host memory fits or not."""
        return [t for t in self.compiled if t.total <= self.limits.room]

    @property
    def fitting(self) -> list[Trial]:
        """What fits on the device and in host memory."""
        return [t for t in self.within_budget if t.host_bytes <= self.limits.host_room]

    def model(self) -> Expected:
        """Fits the memory model to every compile that is known."""
        return fitted(self.profile, [*self.compiled, *self.recalled])

    def problem(self, model: Expected, share: float = 1.0) -> Problem:
        """Returns what the solver is asked: its room is what is left of a `share` of the limits'
        room beside the arguments and the working memory of the model's reference.
        """
        room = int(self.limits.room * share) - self.static - int(model.reference)
        return Problem(self.profile, room, self.limits.host_room, model.working)


def fitted(profile: Profile, trials: Sequence[Trial]) -> Expected:
    """Fits the memory model to compiled plans; the first that has choices is its reference."""
    return Expected.fit([(t.actions, t.working) for t in trials], profile)
