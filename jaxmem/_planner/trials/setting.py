"""What a search is given: a step and what compiles it, the limits, and what is known already."""

import dataclasses

from jaxmem._core.actions import AS_WRITTEN, Actions
from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.times import check_goes_on, is_beside_training
from jaxmem._planner.trials.compile import CompiledStep, StepCompiler, all_compiled
from jaxmem._planner.trials.history import History
from jaxmem._planner.trials.trial import Limits, Trial
from jaxmem._planner.trials.walks import Walks
from jaxmem._target.compile.running import CannotRun
from jaxmem.errors import StepError

MOST_COMPILES = 6
RUN_SECONDS = 1.0  # for runs of the step with everything kept, and as written


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a search is given.

    profile: the step's, with its layers undivided.
    steps: compiles it, and counts compiles.
    history: what earlier searches compiled.
    limits: the bytes that a plan may take.
    walks: tell what to expect of a plan before it is compiled.
    written: what earlier searches compiled of the step as written, where it has checkpoints of its
      own; else None.
    careful: whether lossy codecs must gain what one would notice, as `Allowed` has it.
    """

    profile: Profile
    steps: StepCompiler
    history: History
    limits: Limits
    walks: Walks
    written: History | None = None
    careful: bool = False

    def history_of(self, actions: Actions) -> History:
        """Where a compile of the step under `actions` is remembered."""
        return self.written if self.written and actions == AS_WRITTEN else self.history

    @property
    def compiles_left(self) -> int:
        """How many plans this search may still compile. Where that only assigns buffers, the plan
        that is returned is compiled once more, and whole. The step as written comes on top.
        """
        last = 1 if self.steps.backend.assigns else 0
        return MOST_COMPILES + (self.written is not None) - last - self.steps.compiles

    def compile(self, *many: Actions, least: int | None = None) -> list[CompiledStep]:
        """Compiles the step under each of `many` actions, logs that it does, and remembers the
        results. Raises StepError for what XLA does not compile.

        `least` is the least bytes that compiled so far, for the log.
        """
        return all_compiled(self.attempt(*many, least=least))

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
        for actions, step in zip(many, found):
            if isinstance(step, CompiledStep):
                self.history_of(step.actions).remember(step)
            else:
                warn_left_out(actions, step)
        return found


def warn_left_out(actions: Actions, error: StepError) -> None:
    """Logs that XLA does not compile the step under `actions`, which the search goes on without."""
    what = "the step as written" if actions == AS_WRITTEN else "a plan"
    LOG.warning("%s is left out: %s", what, str(error)[:400])
