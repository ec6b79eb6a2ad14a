"""The state of one search: its inputs, its compiles, and the models that are fitted to them."""

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

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
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.memory import working_bytes
from jaxmem._planner.solve.problem import ActionProblem, Key
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._target.compile.running import CannotRun
from jaxmem.errors import StepError

MOST_COMPILES = 6
RUN_SECONDS = 1.0  # seconds for runs of the step with everything kept, and as written
# The time limit of one run of the solver. Compared with compiles, a proof is worth no more seconds.
SOLVE_SECONDS = 10.0


@dataclasses.dataclass
class Search:
    """A search for a plan of one step on one target.

    profile: the profile of the step, with undivided layers.
    limits: the bytes that a plan may take.
    compiler: compiles the step, and counts compiles.
    history: the compiles of earlier searches.
    estimates: liveness estimates of plans that were not compiled.
    history_as_written: earlier compiles of the step as written, if it has checkpoints of its own;
      else None.
    planned: whether the step as its author wrote it has policies of jaxmem.
    codecs_by_default: whether a lossy codec must gain at least `MIN_GAIN_DEFAULT` of the step, as
      `Allowed.codecs_by_default`.
    lossless: whether the solver searches for plans without lossy codecs only.
    plan_trials: the plans that this search compiled, without the baseline.
    recalled: the compiles of earlier searches. They guide this search, and are never returned.
    in_spans: the compiled plans with layers in spans. The memory model is of undivided layers, and
      is not fitted to them.
    refused: plans that XLA did not compile.
    trial_as_written: the step as its author wrote it. It is the baseline if it keeps everything. It
      is None if a plan's policies decide the step.
    profile_seconds, solve_seconds: the time of tracing and profiling, and the time of the solver.
    best: the fastest plan that fits, once the search has ended; None if no plan fits.
    divided_problem: the problem of the groups of layers into which the best plan divides layers;
      None if the plan divides no layers.
    corrections: by choice, the seconds in whole steps less the profile's seconds, as
      `ActionProblem.corrections`; empty if `refine_by_whole_steps` corrected no prices.
    baseline: the step with everything kept, once it is compiled. If it is from an earlier search,
      it does not fit.
    """

    profile: Profile
    limits: Limits
    compiler: StepCompiler
    history: History
    estimates: Estimates
    history_as_written: History | None = None
    planned: bool = False
    codecs_by_default: bool = False
    lossless: bool = False
    plan_trials: list[Trial] = dataclasses.field(default_factory=list)
    recalled: list[Trial] = dataclasses.field(default_factory=list)
    in_spans: list[Trial] = dataclasses.field(default_factory=list)
    refused: list[Actions] = dataclasses.field(default_factory=list)
    trial_as_written: Trial | None = None
    profile_seconds: float = 0.0
    solve_seconds: float = 0.0
    best: Trial | None = None
    divided_problem: ActionProblem | None = None
    corrections: Mapping[Key, float] = dataclasses.field(default_factory=dict)
    baseline: Trial = dataclasses.field(init=False)

    @property
    def step_time(self) -> StepTime:
        """The model of the seconds of whole steps."""
        return step_time_of(self.profile, self.baseline, self.compiler.backend.target)

    def solved(self, solver, *arguments):
        """Calls `solver`, and adds its time to `solve_seconds`."""
        start = time.perf_counter()
        solution = solver(*arguments)
        self.solve_seconds += time.perf_counter() - start
        return solution

    def without_loss(self) -> "Search":
        """A copy of the search that shares its lists, and that solves for lossless plans only."""
        exact = copy.copy(self)
        exact.lossless = True
        return exact

    def history_of(self, actions: Actions) -> History:
        """The history that stores compiles of the step under `actions`."""
        as_written = self.history_as_written if actions == AS_WRITTEN else None
        return self.history if as_written is None else as_written

    @property
    def compiles_left(self) -> int:
        """The number of plans that this search may still compile. On a target that compiles for
        buffers, one compile is reserved for the full compile of the returned plan. The compile of
        the step as written does not count.
        """
        last = 1 if self.compiler.backend.stops_at_buffers else 0
        return MOST_COMPILES + (self.history_as_written is not None) - last - self.compiler.compiles

    def compile_buffers(self, *many: Actions, least: int | None = None) -> list[CompiledStep]:
        """Compiles the step under each of `many` actions, logs the compiles, and stores the results
        in the history. Raises StepError if XLA does not compile one of the steps.

        least: the least compiled bytes so far, for the log.
        """
        return all_compiled(self.try_compile_buffers(*many, least=least))

    def timed(self, *trials: Trial) -> list[Trial]:
        """The trials with measured seconds. A trial that does not run on the device at hand, or
        exceeds its memory, has none. If one trial has no stored measurement, all trials are run, in
        alternation: measurements of different times cannot be compared.
        """
        if not self.compiler.backend.target.local:
            return [*trials]
        known = [self.history_of(t.actions).recall_seconds() for t in trials]
        # Compiles of earlier searches have no executable, and cannot be run.
        ready = [i for i, t in enumerate(trials) if t.step.compiled.executable is not None]
        if None in known and ready and not is_beside_training():
            LOG.info("timing the step without a plan")
            try:
                rounds = self.compiler.run(*(trials[i].step for i in ready), seconds=RUN_SECONDS)
            except CannotRun as why:
                LOG.info("the step without a plan is not timed: %s", why)
                rounds = []
            for i, seconds in zip(ready, rounds):
                if seconds:
                    known[i] = self.history_of(trials[i].actions).remember_seconds(seconds)
        return [dataclasses.replace(t, measured_seconds=s) for t, s in zip(trials, known)]

    def try_compile_buffers(
        self, *many: Actions, least: int | None = None
    ) -> list[CompiledStep | StepError]:
        """Compiles the step under each of `many` actions. For a step that XLA does not compile, the
        result is the error: because of a defect of XLA, one plan may fail and others compile.
        """
        check_goes_on()
        done = self.compiler.compiles
        most = max(MOST_COMPILES, done + len(many))  # `measure=` compiles more than MOST_COMPILES
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
        results = self.compiler.try_compile_buffers(*many)
        for actions, step in zip(many, results):
            if isinstance(step, CompiledStep):
                self.history_of(step.actions).remember(step)
            else:
                warn_of_refusal(actions, step)
        return results

    @property
    def trials(self) -> list[Trial]:
        """The trials whose step an assignment of choices to tags describes: the baseline and
        `plan_trials`. No assignment describes the step as written, so that the memory model is not
        fitted to it.
        """
        return [self.baseline, *self.plan_trials]

    @property
    def with_checkpoints(self) -> Trial | None:
        """The step as written, if it has checkpoints of its own."""
        return None if self.trial_as_written is self.baseline else self.trial_as_written

    @property
    def checkpoints_fit(self) -> Trial | None:
        """The step as written, if it has checkpoints of its own and fits."""
        as_written = self.with_checkpoints
        return as_written if as_written is not None and self.limits.allow(as_written) else None

    @property
    def least_bytes(self) -> int:
        """The least compiled bytes of this search."""
        return self.smallest_trial.total

    @property
    def smallest_trial(self) -> Trial:
        """The trial of least compiled bytes; may be the step as written."""
        as_written = [] if self.with_checkpoints is None else [self.with_checkpoints]
        return min((*self.trials, *self.in_spans, *as_written), key=lambda t: t.total)

    @property
    def static(self) -> int:
        """Bytes of the step's arguments, which no action changes."""
        return self.baseline.step.compiled.argument_bytes

    def predicted(self, beside: float) -> int:
        """The predicted bytes of a step.

        beside: predicted bytes in addition to the arguments. The prediction may be negative for
          plans that differ much from the plans to which the memory model was fitted. It then counts
          as 0.
        """
        return self.static + max(0, int(beside))

    @property
    def fitting_on_device(self) -> list[Trial]:
        """The trials that fit on the device, whether or not they fit in host memory."""
        return [t for t in self.trials if t.total <= self.limits.usable_bytes]

    @property
    def fitting(self) -> list[Trial]:
        """The trials that fit on the device and in host memory."""
        return [t for t in self.trials if self.limits.allow(t)]

    def compile_solutions(self, picks: Sequence[ActionSolution]) -> list[Trial]:
        """Compiles solutions, if there are any. Returns their trials, and adds them to
        `plan_trials`. Solutions that XLA does not compile are added to `refused`.
        """
        if not picks:
            return []
        # A trial keeps the prediction of the memory model before the model was fitted to the trial.
        expected = [self.expected(pick) for pick in picks]
        steps = self.try_compile_buffers(*(pick.actions for pick in picks), least=self.least_bytes)
        trials = []
        for step, pick, predicted in zip(steps, picks, expected):
            if isinstance(step, StepError):
                self.refused.append(pick.actions)
            else:
                trials.append(Trial(step, pick.cost, predicted, pick.gap))
        self.plan_trials += trials
        return trials

    def compiled_fully(self, trial: Trial) -> Trial | None:
        """Compiles a trial fully, and replaces it by the result; None if XLA does not compile it.

        Raises StepError if XLA does not compile the step with everything kept.
        """
        try:
            step = self.compiler.compile_fully(trial.step)
        except StepError as error:
            if trial is self.baseline:
                raise
            warn_of_refusal(trial.actions, error)
            if trial is self.trial_as_written:
                self.trial_as_written = None
                return None
            self.refused.append(trial.actions)
            self.plan_trials = [t for t in self.plan_trials if t is not trial]
            self.in_spans = [t for t in self.in_spans if t is not trial]
            return None
        if step is trial.step:
            return trial
        self.history_of(step.actions).remember(step)
        full = dataclasses.replace(trial, step=step)
        self.trial_as_written = full if trial is self.trial_as_written else self.trial_as_written
        self.baseline = full if trial is self.baseline else self.baseline
        self.plan_trials = [full if t is trial else t for t in self.plan_trials]
        self.in_spans = [full if t is trial else t for t in self.in_spans]
        return full

    def model(self) -> Additive:
        """Fits the memory model to the compiles of this search and of earlier ones, and to liveness
        estimates. The first compile that has choices is the model's reference.
        """
        known = [*self.trials, *self.recalled]
        return self.estimates.model([(t.actions, t.working) for t in known])

    def expected(self, solution: ActionSolution) -> int:
        """The compiled bytes that the memory model predicts for a solution, after a liveness
        estimate of the solution.
        """
        self.estimates.learn(solution.actions)
        return self.predicted(solution.saved_bytes + self.model().predict(solution.actions))

    def estimated(self, actions: Actions, known: Trial) -> int | None:
        """Bytes of the step under actions of layers in groups or in spans: the compiled bytes of a
        known plan, plus the difference of the liveness estimates of both; None once the limit of
        estimates is reached, and for a known plan that no actions describe.
        """
        if known is self.with_checkpoints:
            return None
        size, size_of_known = map(self.estimates.estimate, (actions, known.actions))
        if size is None or size_of_known is None:
            return None
        return known.total + size - size_of_known

    def compile_divided(
        self, solution: ActionSolution, by_model: int, known: Trial, least: int
    ) -> Trial | None:
        """Compiles a solution whose layers are in groups or in spans; None if XLA does not compile
        it.

        by_model: the bytes that the memory model predicts.
        known: a compiled plan, whose bytes correct the liveness estimates.
        least: the least compiled bytes so far, for the log.
        """
        estimated = self.estimated(solution.actions, known)
        (step,) = self.try_compile_buffers(solution.actions, least=least)
        if isinstance(step, StepError):
            return None
        predicted = max(self.static, by_model if estimated is None else estimated)
        return Trial(step, solution.cost, predicted, solution.gap)

    def agreed(
        self, solve: Callable[[ActionProblem], ActionSolution | None], share: float = 1.0
    ) -> ActionSolution | None:
        """Returns the solution of `solve` for a `share` of the usable bytes. Solves again until a
        liveness estimate agrees that the solution fits, or until more estimates do not help.
        """
        available = self.limits.usable_bytes * share - self.static
        by_model = lambda model: solve(self.problem(model, share))
        return agreed(by_model, self.model, available, self.estimates)

    def problem(self, model: Additive, share: float = 1.0) -> ActionProblem:
        """Returns the problem for the solver. Its room is a `share` of the usable bytes, less the
        arguments, and less the working memory of the memory model's reference.
        """
        room = int(self.limits.usable_bytes * share) - self.static - int(model.reference)
        problem = ActionProblem(
            self.profile,
            room,
            self.limits.host_bytes,
            working_bytes(model),
            excluded=tuple(self.refused),
            time_limit=SOLVE_SECONDS,
        )
        return problem.lossless() if self.lossless else problem


def warn_of_refusal(actions: Actions, error: StepError) -> None:
    """Logs that XLA does not compile the step under `actions`. The search continues without it."""
    subject = "the step as written" if actions == AS_WRITTEN else "a plan"
    LOG.warning("%s is left out: %s", subject, str(error)[:400])
