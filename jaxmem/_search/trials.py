"""The compiles of one search: what makes them, plans with their bytes, and the memory model that is
fitted to them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxmem._core.actions import Actions
from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._profile.times import check_goes_on, is_beside_training
from jaxmem._search.compile import CompiledStep, StepCompiler, all_compiled
from jaxmem._search.descent import descended
from jaxmem._search.history import History
from jaxmem._search.walks import Walks, agreed
from jaxmem._solver.cost import Cost
from jaxmem._solver.memory import Expected
from jaxmem._solver.problem import Problem
from jaxmem._solver.solution import Solution
from jaxmem._xla.running import CannotRun
from jaxmem.errors import StepError

MOST_COMPILES = 6
RUN_SECONDS = 1.0  # for runs of the step with everything kept
SOLVE_SECONDS = 10.0  # for one run of the solver: a proof is worth no more beside compiles


@dataclasses.dataclass(frozen=True)
class Trial:
    """A plan that was compiled.

    step: what it compiled to.
    cost: its price by the profile.
    predicted_bytes: what was said of its total before the compile.
    gap: by what share the optimum may be faster, where the solver's time ran out (`Solution.gap`).
    """

    step: CompiledStep
    cost: Cost
    predicted_bytes: int
    gap: float = 0.0

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
    def xla_seconds(self) -> float | None:
        """XLA's estimate of the whole step, and the copies to host memory that it does not price;
        None where XLA says nothing.
        """
        seconds = self.step.compiled.xla_seconds
        return None if seconds is None else seconds + self.cost.host_seconds

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

    def allow(self, trial: Trial) -> bool:
        """Whether it fits on the device and in host memory."""
        return trial.total <= self.room and trial.host_bytes <= self.host_room


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a search is given.

    profile: the step's, with its layers undivided.
    steps: compiles it, and counts compiles.
    history: what earlier searches compiled.
    limits: the bytes that a plan may take.
    walks: tell what to expect of a plan before it is compiled.
    """

    profile: Profile
    steps: StepCompiler
    history: History
    limits: Limits
    walks: Walks

    @property
    def compiles_left(self) -> int:
        """How many plans this search may still compile. Where that only assigns buffers, the plan
        that is returned is compiled once more, and whole.
        """
        last = 1 if self.steps.backend.assigns else 0
        return MOST_COMPILES - last - self.steps.compiles

    def compile(self, *many: Actions, least: int | None = None) -> list[CompiledStep]:
        """Compiles the step under each of `many` actions, logs that it does, and remembers the
        results. Raises StepError for what XLA does not compile.

        `least` is the least bytes that compiled so far, for the log.
        """
        return all_compiled(self.attempt(*many, least=least))

    def seconds_of(self, baseline: Trial) -> float | None:
        """Measured seconds of the step with everything kept; None where it does not run here, or
        not within this device's memory.
        """
        if not self.steps.backend.target.local:
            return None
        if (known := self.history.recall_seconds()) is not None:
            return known
        if is_beside_training():
            return None
        LOG.info("running the step with everything kept, to time it")
        try:
            (rounds,) = self.steps.run(baseline.step, seconds=RUN_SECONDS)
        except CannotRun as why:
            LOG.info("the step with everything kept is not run to be timed: %s", why)
            return None
        return self.history.remember_seconds(rounds) if rounds else None

    def attempt(self, *many: Actions, least: int | None = None) -> list[CompiledStep | StepError]:
        """The same, with the error of each that XLA does not compile in its place: XLA has defects,
        and one plan that meets them is no reason to have none.
        """
        check_goes_on()
        done = self.steps.compiles
        most = max(MOST_COMPILES, done + len(many))  # what `measure=` runs comes on top
        numbers = " and ".join(str(done + i + 1) for i in range(len(many)))
        so_far = ""
        if least is not None:
            budget = show_bytes(self.limits.budget)
            so_far = f"; least so far {show_bytes(least)}, the budget is {budget}"
        LOG.info(
            "compile %s of at most %d%s",
            numbers,
            most,
            so_far,
            extra={"done": done, "of": most},
        )
        found = self.steps.attempt(*many)
        for step in found:
            if isinstance(step, CompiledStep):
                self.history.remember(step)
            else:
                LOG.warning("a plan is left out: %s", str(step)[:400])
        return found


@dataclasses.dataclass
class Trials:
    """The compiles of one step on one target.

    profile: the step, with its layers undivided.
    limits: what a plan may take.
    baseline: the step with everything kept. If it is from an earlier search, it does not fit.
    tried: the other plans that this search compiled.
    recalled: those of earlier searches, which only guide.
    refused: plans that XLA did not compile.
    measured_seconds: those of the step with everything kept, where it was run.
    walks: as in `Setting`; None where nothing is walked through.
    """

    profile: Profile
    limits: Limits
    baseline: Trial
    tried: list[Trial] = dataclasses.field(default_factory=list)
    recalled: list[Trial] = dataclasses.field(default_factory=list)
    refused: list[Actions] = dataclasses.field(default_factory=list)
    measured_seconds: float | None = None
    walks: Walks | None = None

    @property
    def compiled(self) -> list[Trial]:
        """Everything that this search may return."""
        return [self.baseline, *self.tried]

    @property
    def least(self) -> int:
        """The least bytes that this search compiled to."""
        return min(t.total for t in self.compiled)

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
            LOG.warning("a plan is left out: %s", str(error)[:400])
            self.refused.append(trial.actions)
            self.tried = [t for t in self.tried if t is not trial]
            return None
        if step is trial.step:
            return trial
        setting.history.remember(step)
        made = dataclasses.replace(trial, step=step)
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

    def nearest(self, starts: Iterable[Actions], share: float = 1.0) -> Solution | None:
        """Returns the fastest plan that walks expect to fit a `share` of the room, found by small
        changes of `starts`; the one nearest to it where none fits, None where nothing is walked
        through.
        """
        if self.walks is None:
            return None
        known = [(t.actions, t.working) for t in (*self.compiled, *self.recalled)]
        room = self.limits.room * share - self.static
        return descended(starts, self.problem(self.model()), self.walks.expecting(known), room)

    def problem(self, model: Expected, share: float = 1.0) -> Problem:
        """Returns what the solver is asked: its room is what is left of a `share` of the limits'
        room beside the arguments and the working memory of the model's reference.
        """
        room = int(self.limits.room * share) - self.static - int(model.reference)
        return Problem(
            self.profile,
            room,
            self.limits.host_room,
            model.working,
            excluded=tuple(self.refused),
            time_limit=SOLVE_SECONDS,
        )


def fitted(profile: Profile, trials: Sequence[Trial], walks: Walks | None = None) -> Expected:
    """Fits the memory model to compiled plans, and to walks through others; the first that has
    choices is its reference.
    """
    measured = [(t.actions, t.working) for t in trials]
    return Expected.fit(measured, profile) if walks is None else walks.model(measured)
