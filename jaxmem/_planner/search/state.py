"""The state of one search: what it was given, what it compiled, and what it learned."""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxmem._core.actions import AS_WRITTEN, Actions
from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.times import check_goes_on, is_beside_training
from jaxmem._planner.search.compile import CompiledStep, StepCompiler, all_compiled
from jaxmem._planner.search.estimates import Estimates, agreed
from jaxmem._planner.search.history import History
from jaxmem._planner.search.step_time import StepTime, step_time_of
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._planner.solve.memory import Expected
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution
from jaxmem._target.compile.running import CannotRun
from jaxmem.errors import StepError

MOST_COMPILES = 6
RUN_SECONDS = 1.0  # for runs of the step with everything kept, and as written
SOLVE_SECONDS = 10.0  # for one run of the solver: a proof is worth no more beside compiles


@dataclasses.dataclass
class Search:
    """A search for a plan of one step on one target.

    profile: the step, with its layers undivided.
    limits: the bytes that a plan may take.
    steps: compiles the step, and counts compiles.
    history: the compiles of earlier searches.
    estimates: liveness estimates of plans that were not compiled.
    written_history: earlier compiles of the step as written, where it has checkpoints of its own;
      else None.
    careful: whether a lossy codec must gain what a user would notice, as `Allowed` has it.
    lossless: whether the solver is asked for plans without lossy codecs alone.
    tried: the plans that this search compiled, the baseline aside.
    recalled: the compiles of earlier searches, which only guide.
    refused: plans that XLA did not compile.
    written: the step as its author wrote it: the baseline itself where that keeps everything, None
      where a plan decides the step however it is written.
    profile_seconds, solve_seconds: the time of tracing and profiling, and the time of the solver.
    baseline: the step with everything kept, once it is compiled. If it is from an earlier search,
      it does not fit.
    """

    profile: Profile
    limits: Limits
    steps: StepCompiler
    history: History
    estimates: Estimates
    written_history: History | None = None
    careful: bool = False
    lossless: bool = False
    tried: list[Trial] = dataclasses.field(default_factory=list)
    recalled: list[Trial] = dataclasses.field(default_factory=list)
    refused: list[Actions] = dataclasses.field(default_factory=list)
    written: Trial | None = None
    profile_seconds: float = 0.0
    solve_seconds: float = 0.0
    baseline: Trial = dataclasses.field(init=False)

    @property
    def step_time(self) -> StepTime:
        """Tells the seconds of whole steps."""
        return step_time_of(self.profile, self.baseline, self.steps.backend.target)

    def solved(self, solver, *arguments):
        """What `solver` returns, and its time added to `solve_seconds`."""
        start = time.perf_counter()
        found = solver(*arguments)
        self.solve_seconds += time.perf_counter() - start
        return found

    def without_loss(self) -> "Search":
        """The same search, with the same lists, that asks the solver for lossless plans alone."""
        exact = copy.copy(self)
        exact.lossless = True
        return exact

    def history_of(self, actions: Actions) -> History:
        """Where a compile of the step under `actions` is remembered."""
        own = self.written_history if actions == AS_WRITTEN else None
        return self.history if own is None else own

    @property
    def compiles_left(self) -> int:
        """How many plans this search may still compile. Where that only assigns buffers, the plan
        that is returned is compiled once more, and whole. The step as written comes on top.
        """
        last = 1 if self.steps.backend.assigns else 0
        return MOST_COMPILES + (self.written_history is not None) - last - self.steps.compiles

    def compile(self, *many: Actions, least: int | None = None) -> list[CompiledStep]:
        """Compiles the step under each of `many` actions, logs that it does, and remembers the
        results. Raises StepError for what XLA does not compile.

        `least` is the least bytes that compiled so far, for the log.
        """
        return all_compiled(self.try_compile(*many, least=least))

    def timed(self, *trials: Trial) -> list[Trial]:
        """The trials with measured seconds, those aside that do not run here, or not within this
        device's memory. Where one was not run before, all are run, in turns: seconds of another
        minute tell nothing of which is faster.
        """
        if not self.steps.backend.target.local:
            return [*trials]
        known = [self.history_of(t.actions).recall_seconds() for t in trials]
        # What earlier searches compiled is only remembered, and cannot be run.
        ready = [i for i, t in enumerate(trials) if t.step.compiled.executable is not None]
        if None in known and ready and not is_beside_training():
            LOG.info("running the step as it is, to time it")
            try:
                rounds = self.steps.run(*(trials[i].step for i in ready), seconds=RUN_SECONDS)
            except CannotRun as why:
                LOG.info("the step as it is is not run to be timed: %s", why)
                rounds = []
            for i, own in zip(ready, rounds):
                if own:
                    known[i] = self.history_of(trials[i].actions).remember_seconds(own)
        return [dataclasses.replace(t, measured_seconds=s) for t, s in zip(trials, known)]

    def try_compile(
        self, *many: Actions, least: int | None = None
    ) -> list[CompiledStep | StepError]:
        """Compiles the step under each of `many` actions; an error stands for a step that XLA does
        not compile. XLA has defects, and one plan that meets them is no reason to have none.
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
        found = self.steps.try_compile(*many)
        for actions, step in zip(many, found):
            if isinstance(step, CompiledStep):
                self.history_of(step.actions).remember(step)
            else:
                warn_left_out(actions, step)
        return found

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
        return [t for t in self.compiled if t.total <= self.limits.usable_bytes]

    @property
    def fitting(self) -> list[Trial]:
        """What fits on the device and in host memory."""
        return [t for t in self.compiled if self.limits.allow(t)]

    def compile_solutions(self, picks: Sequence[Solution]) -> list[Trial]:
        """Compiles solutions, if there are any. Returns their trials, which are added to `tried`;
        those that XLA refuses are added to `refused`.
        """
        if not picks:
            return []
        # Each trial keeps the prediction of the model before it learned of the trial.
        expected = [self.expected(pick) for pick in picks]
        steps = self.try_compile(*(pick.actions for pick in picks), least=self.least)
        found = []
        for step, pick, predicted in zip(steps, picks, expected):
            if isinstance(step, StepError):
                self.refused.append(pick.actions)
            else:
                found.append(Trial(step, pick.cost, predicted, pick.gap))
        self.tried += found
        return found

    def compiled_fully(self, trial: Trial) -> Trial | None:
        """Returns a trial as its whole compile is, which takes its place; None where XLA does not
        compile it.

        Raises StepError where that is the step with everything kept.
        """
        try:
            step = self.steps.compile_fully(trial.step)
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
        self.history_of(step.actions).remember(step)
        made = dataclasses.replace(trial, step=step)
        self.written = made if trial is self.written else self.written
        self.baseline = made if trial is self.baseline else self.baseline
        self.tried = [made if t is trial else t for t in self.tried]
        return made

    def model(self) -> Expected:
        """Fits the memory model to every compile that is known, and to liveness estimates; the
        first compile that has choices is its reference.
        """
        known = [*self.compiled, *self.recalled]
        return self.estimates.model([(t.actions, t.working) for t in known])

    def expected(self, solution: Solution) -> int:
        """Bytes of the step that a solution is expected to compile to, of which it
        makes a liveness estimate.
        """
        self.estimates.learn(solution.actions)
        return self.predicted(solution.saved_bytes + self.model().predict(solution.actions))

    def agreed(
        self, ask: Callable[[Problem], Solution | None], share: float = 1.0
    ) -> Solution | None:
        """Returns what `ask` answers to the problem of a `share` of the room, when estimates agree
        that it fits.
        """
        beside = self.limits.usable_bytes * share - self.static
        return agreed(lambda m: ask(self.problem(m, share)), self.model, beside, self.estimates)

    def problem(self, model: Expected, share: float = 1.0) -> Problem:
        """Returns what the solver is asked: its room is what is left of a `share` of the limits'
        room beside the arguments and the working memory of the model's reference.
        """
        room = int(self.limits.usable_bytes * share) - self.static - int(model.reference)
        problem = Problem(
            self.profile,
            room,
            self.limits.host_bytes,
            model.working,
            excluded=tuple(self.refused),
            time_limit=SOLVE_SECONDS,
        )
        return problem.lossless() if self.lossless else problem


def warn_left_out(actions: Actions, error: StepError) -> None:
    """Logs that XLA does not compile the step under `actions`, which the search goes on without."""
    what = "the step as written" if actions == AS_WRITTEN else "a plan"
    LOG.warning("%s is left out: %s", what, str(error)[:400])
