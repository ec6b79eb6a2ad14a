"""`jaxmem.runs.Rectifier`: revises a plan while a model trains (Adacc §3.4).

The rectifier counts outlier channels and gives codecs capacity for them. If another plan is then
better, the step of that plan replaces the current step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmem._core.actions import ALL, Action
from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan import file
from jaxmem._result.plan.plan import Plan, check_is_plan
from jaxmem._train.rectifier.counts import Outliers, counted
from jaxmem._train.rectifier.decide import (
    SLOWER,
    StepTimes,
    changed,
    identity,
    most_gained,
    overflows,
    planning_seconds,
    rooms,
    without_room,
)
from jaxmem._train.rectifier.replan import Made, Replanner
from jaxmem._train.rectifier.track import Watch, said
from jaxmem.errors import BudgetError, StepError

LESS = 0.9  # after a step ran out of memory: the next budget, as a share of the step's bytes
Row = dict[str, Any]  # of a decision


class Rectifier:
    """Counts outlier channels during training, and replans the step if needed (Adacc §3.4).

        rectifier = jaxmem.runs.Rectifier(plan, build, state, batch)
        jaxmem.runs.train(plan.step, init, data, steps=1000, run=run, rectifier=rectifier)

    A separate program computes the step's forward, and counts the outlier channels (Z > 3) of each
    tagged tensor whose codec separates outliers. The program runs before steps 1, 2, 4, 8 and so
    on, and later before every `every`-th step.

    If a tensor has more outlier channels than its codec has capacity, `jaxmem.plan` runs again, in
    a thread while training continues, with capacity for the counts. `jaxmem.plan` also runs again
    if the counts ask for another capacity, and a faster plan could save more time in the remaining
    steps than planning takes. The step of the new plan replaces the current step between two steps.
    Parameters, moments and data are unchanged.

    Each decision, taken or declined, is a row of decisions.jsonl in the run's folder. Each count is
    a row of outliers.jsonl.

    Attributes:
      plan: the current plan.
    """

    def __init__(
        self,
        plan: Plan,
        build: Callable,
        *args: Any,
        every: int = 1024,
        wrap: Callable[[Any], Any] = lambda step: step,
        **asked: Any,
    ):
        """Takes the plan, and the arguments that `jaxmem.plan` received.

        Arguments:
          plan: the plan that `jaxmem.plan` returned.
          build: the `build` of `jaxmem.plan`.
          args: the step's arguments, as arrays or shapes. For a plan with `batch=`, the arguments
            of the chosen size.
          every: the largest number of steps between two counts.
          wrap: a function from a plan's step to the step that `train` runs, if `train` receives
            more than the plan's step. `wrap` is called with the step of each new plan.
          asked: the options of `jaxmem.plan` that limit a plan's choices: `codecs`, `actions`,
            `host_budget` and `decide`.

        Raises StepError for other arguments, and for a plan that divides states over devices.
        """
        check_is_plan("Rectifier", plan=plan)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise StepError(f"Rectifier: `every` is {every!r}; expected a number of steps, from 1")
        if plan.divided not in (None, "nothing"):
            raise StepError(
                f"Rectifier: the plan divides {plan.divided} over devices; expected one that"
                " divides nothing: leave the rectifier out"
            )
        self._first = plan
        self._compresses = any(Action(a).names_codec for a in asked.get("actions") or ALL)
        self._again = Replanner(plan, build, args, asked, wrap)
        self._watch = Watch(self._again.build, self._again.args, asked.get("codecs"), every)
        self.begin()

    def begin(self) -> None:
        """Returns to the first plan, and forgets the counts of an earlier training."""
        self.plan, self._step = self._first, None
        self._budget = self.plan.budget_bytes  # reduced when a step runs out of memory
        self._watch.recent = []
        self._rooms: dict[tuple[str, str], int] | None = None  # the capacities of the last decision
        self._made: Made | None = None
        self._times = StepTimes(self.plan)
        # The steps of the plan before, which are compared with the current plan's, and whether the
        # current plan was taken because it was predicted to be faster.
        self._before: StepTimes | None = None
        self._for_speed = False

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The greatest numbers of outlier channels in the last counted steps.

        The result is a dict: block -> tag -> number.

        `jaxmem.plan(..., outliers=)` takes these numbers.
        """
        return self._watch.counts

    def look(self, number: int, *args: Any) -> list[Row]:
        """Starts to count the outlier channels of step `number`, if a count is due.

        Call `look` before the step runs.

        args: the arguments of the step.

        Returns rows of decisions: none, or one row if counting is not possible.
        """
        room = self._budget if self.plan.target == "local" else None
        return self._unwatched(number, self._watch.look(number, args, room))

    def seen(self, number: int) -> tuple[list[Outliers], list[Row]]:
        """Returns the counts that were started before step `number`, and rows of decisions.

        Both are empty if nothing was counted.
        """
        found, wrong = self._watch.seen(number)
        return found, self._unwatched(number, wrong)

    def _unwatched(self, number: int, wrong: str | None) -> list[Row]:
        """The row of a decision that counting has ended; none if nothing went wrong."""
        if wrong is None:
            return []
        return [self._row(number, False, f"nothing is tracked from here on: {wrong}")]

    def numbers(self, found: Sequence[Outliers]) -> dict[str, float]:
        """Returns the numbers about outliers for the row of a step's metrics.

        found: the counts that `seen` returned.
        """
        channels = sum(one.channels * len(one.counts) for one in found)
        return {
            "outlier_rate": sum(sum(one.counts) for one in found) / max(1, channels),
            "outliers_beyond_room": float(without_room(self.plan.actions, counted(found))),
        }

    def weigh(self, number: int, left: int) -> list[Row]:
        """Decides, after step `number`, whether to replan the step for the counts.

        left: number of remaining steps.

        Returns the row of the decision.
        """
        counts = self.counts
        wanted, over = rooms(counts), overflows(self.plan.actions, self._watch.recent)
        if not self._compresses:
            return [self._row(number, False, "no action that compresses is allowed", left=left)]
        if self._made is not None:
            return [self._row(number, False, "a plan is being made", left=left)]
        if wanted == self._rooms:
            return [self._row(number, False, "room is needed as before", left=left)]
        gain, cost = most_gained(self.plan) * self._times.ratio, planning_seconds(self.plan)
        numbers = {"left": left, "most_gained": gain, "planning": cost}
        self._rooms = wanted
        if not over and gain * left <= cost:
            why = "no plan could gain as much over the steps that are left as planning takes"
            return [self._row(number, False, why, **numbers)]
        self._made = self._again.begin(self._budget, counts)
        why = "; ".join(over) or "tensors need other room, and a faster plan may fit"
        return [self._row(number, True, why, event="plan", outliers=counts, **numbers)]

    def ready(self, number: int, left: int) -> tuple[Any, list[Row]]:
        """Returns the next step function after step `number`, and rows of decisions.

        left: number of remaining steps.

        The step function is None if it does not change.
        """
        if (back := self._slower(number)) is not None:
            return back
        if self._made is None or not self._made.done():
            return None, []
        made, self._made = self._made, None
        step, rows = self._taken(made, number, left)
        # Counts since planning began may need another capacity than the plan has.
        if self._watch.recent and rooms(self.counts) != self._rooms:
            rows += self.weigh(number, left)
        return step, rows

    def _taken(self, made: Made, number: int, left: int) -> tuple[Any, list[Row]]:
        """Takes the plan that was made, or declines it."""
        no = lambda why, **numbers: (None, [self._row(number, False, why, **numbers)])
        try:
            plan, step = made.result()
        except Exception as error:
            return no(f"planning failed: {said(error)}")
        gain = (self.plan.predicted_seconds - plan.predicted_seconds) * self._times.ratio
        numbers: Row = {"left": left, "gain": gain, "predicted_bytes": plan.predicted_bytes}
        numbers["compiled_bytes"] = plan.compiled_bytes
        over = overflows(self.plan.actions, self._watch.recent)
        if plan.actions == self.plan.actions and plan.places == self.plan.places:
            return no("the best plan is the same", **numbers)
        if plan.places != self.plan.places:
            return no("states would lie elsewhere", **numbers)
        if plan.compiled_bytes > self._budget:
            return no("memory ran out meanwhile, and the plan takes too much", **numbers)
        if not over and gain * left <= 0:
            return no("the best plan is no faster", **numbers)
        why = "; ".join(over) or "the new plan is faster"
        return self._swap(number, plan, step, why, for_speed=not over, **numbers)

    def told(self, seconds: float | None) -> None:
        """Records the measured seconds of a step, unless a plan is being made at the same time.

        Planning makes the steps of the training slower, so such seconds are ignored.
        """
        if seconds is not None and self._made is None:
            self._times.told(seconds)

    def less(self, number: int, error: BaseException) -> tuple[Any, list[Row]]:
        """Replans the step for less memory, after step `number` ran out of memory.

        error: the error of the step.

        Returns the step function to continue with, and the row of the decision. Raises BudgetError
        if no plan needs less memory; the message names the buffers that hold the memory.
        """
        self._made = None  # it needs too much memory; the plan below has its capacities
        self._budget = int(LESS * min(self._budget, self.plan.compiled_bytes))
        first = str(error).splitlines()[0][:300]
        try:
            plan, step = self._again.at_once(self._budget, self.counts or None)
            if plan.places != self.plan.places:
                raise BudgetError(
                    f"plan: {show_bytes(self._budget)} are met by a plan alone that places states"
                    " elsewhere",
                    least_bytes=plan.compiled_bytes,
                )
        except BudgetError as none:
            raise BudgetError(
                f"train: step {number} ran out of memory under a plan of"
                f" {show_bytes(self.plan.compiled_bytes)} ({first}), and no plan takes"
                f" {show_bytes(self._budget)}; {none}\n{self._again.explained(self.plan)}",
                least_bytes=none.least_bytes,
            ) from error
        self._rooms = rooms(self.counts) if self._watch.recent else None
        return self._swap(number, plan, step, f"out of memory: {first}", for_speed=None)

    def notes(self) -> dict[str, Any]:
        """Returns the values that a checkpoint stores about the rectifier.

        With these values, a resumed run continues under the same plan.
        """
        return {
            "first": identity(self._first),
            "plan": self.plan.to_json(),
            "recent": self._watch.recent,
            "budget": self._budget,
            "is_planning": self._made is not None,
        }

    def restore(self, number: int, notes: Mapping[str, Any]) -> tuple[Any, list[Row]]:
        """Continues from the values that `notes` returned, at step `number`.

        Returns the step function, or None for the step of the first plan, and rows of decisions. If
        the resumed run was given another first plan than the run began with, the run continues
        under the given plan.
        """
        self._watch.recent = [dict(counts) for counts in notes["recent"]]
        self._rooms = rooms(self.counts) if self._watch.recent else None
        if notes["first"] != identity(self._first):
            self._rooms = None
            why = "the run goes on under the plan that it was given, and not its checkpoint's"
            return None, [self._row(number, False, why)]
        self._budget = min(self._budget, notes["budget"])
        try:
            plan = file.read(Plan, dict(notes["plan"]), "the checkpoint's plan")
            if plan.actions != self.plan.actions:
                self._step = self._again.executable(plan)
                self.plan, self._times = plan, StepTimes(plan, self._step)
        except Exception as error:
            self._rooms = None
            why = f"the checkpoint's plan does not run here: {said(error)}"
            return None, [self._row(number, False, why)]
        if notes["is_planning"]:
            self._made = self._again.begin(self._budget, self.counts)
        return self._step, []

    def close(self) -> None:
        """Stops planning. A compile that is running is finished first."""
        self._again.close()
        self._made = None

    def _slower(self, number: int) -> tuple[Any, list[Row]] | None:
        """Returns to the previous plan if the current plan's steps are slower by the clock."""
        before, now = self._before, self._times.median
        if before is None or now is None:
            return None
        self._before = None
        if before.median is None:
            return None
        apart = now - before.median
        self._again.remember(self.plan, before.plan, apart, before.noise + self._times.noise)
        lost = overflows(before.plan.actions, self._watch.recent)
        if not self._for_speed or before.step is None or lost or apart <= SLOWER * now:
            return None
        why = "its steps are slower than those of the plan before, which comes back"
        numbers = {"median": now, "before": before.median}
        return self._swap(number, before.plan, before.step, why, for_speed=None, **numbers)

    def _swap(
        self, number: int, plan: Plan, step: Any, why: str, *, for_speed: bool | None, **numbers
    ) -> tuple[Any, list[Row]]:
        """Takes a plan. Returns its step, and the row of the decision.

        for_speed: whether the plan was taken because it was predicted to be faster. None if its
          steps are not compared with the steps of the current plan.
        """
        row = self._row(number, True, why, event="swap", **numbers)
        row["changed"] = changed(self.plan, plan)
        self._before = None
        if for_speed is not None:
            if self._times.step is None and self.plan.is_compiled:
                self._times.step = self._again.executable(self.plan)
            self._before, self._for_speed = self._times, for_speed
        self.plan, self._step, self._times = plan, step, StepTimes(plan, step)
        return step, [row]

    def _row(self, number: int, taken: bool, why: str, **numbers: Any) -> Row:
        """The row of a decision, with the predicted and the measured seconds of a step."""
        measured = {} if self._times.median is None else {"step_seconds": self._times.median}
        predicted = {"predicted_seconds": self.plan.predicted_seconds}
        return {"step": number, "taken": taken, "why": why} | predicted | measured | numbers
