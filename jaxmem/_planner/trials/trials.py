"""The compiles of one search: plans with their bytes, and the memory model fitted to them."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxmem._core.actions import Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.memory import Expected
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution
from jaxmem._planner.trials.setting import Setting, warn_left_out
from jaxmem._planner.trials.trial import Limits, Trial
from jaxmem._planner.trials.walks import Walks, agreed
from jaxmem.errors import StepError

SOLVE_SECONDS = 10.0  # for one run of the solver: a proof is worth no more beside compiles


@dataclasses.dataclass
class Trials:
    """The compiles of one step on one target.

    profile: the step, with its layers undivided.
    limits: what a plan may take.
    baseline: the step with everything kept. If it is from an earlier search, it does not fit.
    tried: the other plans that this search compiled.
    recalled: those of earlier searches, which only guide.
    refused: plans that XLA did not compile.
    walks: as in `Setting`; None where nothing is walked through.
    written: the step as its author wrote it: the baseline itself where that keeps everything, None
      where a plan decides the step however it is written.
    lossless: whether the solver is asked for plans that lose nothing alone.
    """

    profile: Profile
    limits: Limits
    baseline: Trial
    tried: list[Trial] = dataclasses.field(default_factory=list)
    recalled: list[Trial] = dataclasses.field(default_factory=list)
    refused: list[Actions] = dataclasses.field(default_factory=list)
    walks: Walks | None = None
    written: Trial | None = None
    lossless: bool = False

    @property
    def compiled(self) -> list[Trial]:
        """Everything that this search may return, the step as written excepted: its own checkpoints
        decide it, so that it teaches nothing about choices of tags.
        """
        return [self.baseline, *self.tried]

    @property
    def checkpointed(self) -> Trial | None:
        """The step as written, where it has checkpoints of its own."""
        return None if self.written is self.baseline else self.written

    @property
    def checkpointed_fits(self) -> Trial | None:
        """The step as written, where it has checkpoints of its own and fits."""
        own = self.checkpointed
        return own if own is not None and self.limits.allow(own) else None

    @property
    def least(self) -> int:
        """The least bytes that this search compiled to."""
        return self.smallest.total

    @property
    def smallest(self) -> Trial:
        """What compiled to the least bytes, be it the step as written."""
        own = [] if self.checkpointed is None else [self.checkpointed]
        return min((*self.compiled, *own), key=lambda t: t.total)

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
        return [t for t in self.compiled if self.limits.allow(t)]

    def proven(self, trial: Trial, setting: Setting) -> Trial | None:
        """Returns a trial as its whole compile is, which takes its place; None where XLA does not
        compile it.

        Raises StepError where that is the step with everything kept.
        """
        try:
            step = setting.steps.prove(trial.step)
        except StepError as error:
            if trial is self.baseline:
                raise
            warn_left_out(trial.actions, error)
            if trial is self.written:
                self.written = None
                return None
            self.refused.append(trial.actions)
            self.tried = [t for t in self.tried if t is not trial]
            return None
        if step is trial.step:
            return trial
        setting.history_of(step.actions).remember(step)
        made = dataclasses.replace(trial, step=step)
        self.written = made if trial is self.written else self.written
        self.baseline = made if trial is self.baseline else self.baseline
        self.tried = [made if t is trial else t for t in self.tried]
        return made

    def model(self) -> Expected:
        """Fits the memory model to every compile that is known, and to walks."""
        return fitted(self.profile, [*self.compiled, *self.recalled], self.walks)

    def expected(self, solution: Solution) -> int:
        """Bytes of the step that a solution is expected to compile to, which it is walked through
        for.
        """
        if self.walks is not None:
            self.walks.learn(solution.actions)
        return self.predicted(solution.saved_bytes + self.model().predict(solution.actions))

    def agreed(
        self, ask: Callable[[Problem], Solution | None], share: float = 1.0
    ) -> Solution | None:
        """Returns what `ask` answers to the problem of a `share` of the room, when walks agree that
        it fits.
        """
        beside = self.limits.room * share - self.static
        return agreed(lambda m: ask(self.problem(m, share)), self.model, beside, self.walks)

    def problem(self, model: Expected, share: float = 1.0) -> Problem:
        """Returns what the solver is asked: its room is what is left of a `share` of the limits'
        room beside the arguments and the working memory of the model's reference.
        """
        room = int(self.limits.room * share) - self.static - int(model.reference)
        problem = Problem(
            self.profile,
            room,
            self.limits.host_room,
            model.working,
            excluded=tuple(self.refused),
            time_limit=SOLVE_SECONDS,
        )
        return problem.lossless() if self.lossless else problem


def fitted(profile: Profile, trials: Sequence[Trial], walks: Walks | None = None) -> Expected:
    """Fits the memory model to compiled plans, and to walks through others; the first that has
    choices is its reference.
    """
    measured = [(t.actions, t.working) for t in trials]
    return Expected.fit(measured, profile) if walks is None else walks.model(measured)
