"""Revises a plan while a model trains (Adacc §3.4): outliers are counted, codecs get room for them,
and where another plan is then better, its step takes the place of the one that runs.
"""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmem._core.bytes import show_bytes
from jaxmem._outliers.counts import Outliers, counted
from jaxmem._outliers.decide import (
    SLOWER,
    Overflow,
    Pace,
    greatest,
    most_gained,
    overflows,
    planning_seconds,
    rooms,
)
from jaxmem._outliers.replan import Replanner
from jaxmem._outliers.track import Tracker
from jaxmem._plan import file
from jaxmem._plan.plan import Plan
from jaxmem.errors import BudgetError, JaxmemError, StepError

RECENT = 2  # tracked steps whose counts room is made for
LESS = 0.9  # the share of its bytes that a step which ran out of memory may take


class Rectifier:
    """Counts outliers while a model trains, and plans anew where they ask for it.

        rectifier = jaxmem.runs.Rectifier(plan, build, state, batch)
        jaxmem.runs.train(plan.step, init, data, steps=1000, run=run, rectifier=rectifier)

    Tagged tensors of linear, norm, gelu and residual kinds are looked at before steps 1, 2, 4 and
    so on, by a program that computes the step's forward alone and changes nothing. Where channels
    with Z > 3 are more than a codec of the plan has room for, or so much fewer that a faster plan
    may fit, `jaxmem.plan` runs again beside the training, with room for what was counted. Its step
    takes the place of the other between two steps; parameters, moments and data are as they were.
    Each decision, taken or not, is a row of decisions.jsonl in the run's folder, and what was
    counted one of outliers.jsonl.

    Attributes:
      plan: the plan that trains now.
    """

    def __init__(self, plan: Plan, build: Callable, *args: Any, every: int = 1024, **asked: Any):
        """Takes what `jaxmem.plan` was given.

        Arguments:
          plan: what it returned.
          build: its `build`.
          args: the step's arguments; shapes are enough.
          every: how many steps two trackings are apart at most.
          asked: what else it was given but for `budget`, `target`, `outliers`, `microbatches`,
            `batch` and `sizes`: such as `codecs`, `actions` and `host_budget`.

        Raises StepError for a plan that divides states over devices, whose step is another.
        """
        if not isinstance(every, int) or every < 1:
            raise StepError(f"Rectifier: `every` is {every!r}; expected a number of steps, from 1")
        if plan.divided not in (None, "nothing"):
            raise StepError(
                f"Rectifier: the plan divides {plan.divided} over devices; expected one that"
                " divides nothing: leave the rectifier out"
            )
        self.plan = plan
        self._every = every
        self._again = Replanner(plan, build, args, asked)
        self._tracker: Tracker | None = None
        self._untracked = False  # that nothing can be tracked was said
        self._scores: dict[int, list[jax.Array]] = {}  # by step; the device need not be waited for
        self._recent: list[dict[str, dict[str, int]]] = []
        self._rooms: dict[tuple[str, str], int] | None = None  # those that were decided about
        self._made: concurrent.futures.Future[tuple[Plan, Any]] | None = None
        self._over: list[Overflow] = []
        self._pace = Pace()
        self._before: tuple[Plan, Any, Pace] | None = None  # what a new plan is compared with
        self._step: Any = None

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The greatest count of outlier channels by block and tag, of the latest trackings: what
        `jaxmem.plan(..., outliers=)` takes.
        """
        return greatest(self._recent)

    def is_due(self, number: int) -> bool:
        """Whether outliers are counted before this step: one of 1, 2, 4 and so on, and one of each
        `every`.
        """
        return (number & (number - 1) == 0 and number < self._every) or number % self._every == 0

    def look(self, number: int, *args: Any) -> list[dict[str, Any]]:
        """Begins to count the outliers of a step that is about to run. Returns rows of decisions:
        none, unless nothing can be tracked.
        """
        if self._untracked or not self.is_due(number):
            return []
        try:
            if self._tracker is None:
                self._tracker = Tracker(self._again.build, self._again.args)
                self._tracker.compile(*args)
                if self.plan.target == "local" and self._tracker.bytes > self.plan.budget_bytes:
                    raise StepError(
                        f"track: counting takes {self._tracker.bytes:,} bytes of a budget of"
                        f" {self.plan.budget_bytes:,}"
                    )
            self._scores[number] = self._tracker(*args)
        except JaxmemError as error:
            self._untracked = True
            return [{"step": number, "taken": False, "why": f"nothing is tracked: {error}"}]
        return []

    def seen(self, number: int) -> list[Outliers]:
        """What was counted before step `number`; empty where nothing was."""
        scores = self._scores.pop(number, None)
        if scores is None or self._tracker is None:
            return []
        found = self._tracker.read(number, scores)
        self._recent = [*self._recent, counted(found)][-RECENT:]
        return found

    def numbers(self, found: Sequence[Outliers]) -> dict[str, float]:
        """What a step's row of metrics says of its outliers."""
        channels = sum(one.channels * len(one.counts) for one in found)
        over = {(o.block, o.tag): o.capacity for o in overflows(self.plan.actions, counted(found))}
        beyond = sum(one.beyond(over.get((one.block, one.tag), one.most)) for one in found)
        return {
            "outlier_rate": sum(sum(one.counts) for one in found) / max(1, channels),
            "outliers_beyond_room": float(beyond),
        }

    def weigh(self, number: int, left: int) -> list[dict[str, Any]]:
        """Decides, after step `number` with `left` more to go, whether to plan anew for what was
        counted; returns the decision's row.
        """
        counts = self.counts
        wanted = rooms(counts)
        over = overflows(self.plan.actions, counts)
        if self._made is not None:
            return [self._row(number, False, "a plan is being made", left=left)]
        if wanted == self._rooms:
            return [self._row(number, False, "room is needed as before", left=left)]
        gain, cost = most_gained(self.plan) * self._pace.of(self.plan), planning_seconds(self.plan)
        self._rooms = wanted
        if not over and gain * left <= cost:
            why = "no plan could gain as much over the steps that are left as planning takes"
            return [self._row(number, False, why, left=left, most_gained=gain, planning=cost)]
        self._over = over
        self._made = self._again.begin(self.plan.budget_bytes, counts)
        why = "; ".join(map(str, over)) or "tensors need other room, and a faster plan may fit"
        row = self._row(number, True, why, left=left, most_gained=gain, planning=cost)
        return [row | {"event": "plan", "outliers": counts}]

    def ready(self, number: int, left: int) -> tuple[Any, list[dict[str, Any]]]:
        """After step `number`: the step to go on with, or None for the same, and rows of what was
        decided.
        """
        if (back := self._slower(number)) is not None:
            return back
        if self._made is None or not self._made.done():
            return None, []
        made, self._made = self._made, None
        step, rows = self._taken(made, number, left)
        # What was counted meanwhile may ask for other room than it was made for.
        if rooms(self.counts) != self._rooms:
            rows += self.weigh(number, left)
        return step, rows

    def _taken(self, made, number: int, left: int) -> tuple[Any, list[dict[str, Any]]]:
        """Takes the plan that was made, or declines it."""
        try:
            plan, step = made.result()
        except BudgetError as error:
            return None, [self._row(number, False, f"no plan fits: {error}")]
        except JaxmemError as error:
            return None, [self._row(number, False, f"planning failed: {error}")]
        now, then = self.plan.predicted_seconds, plan.predicted_seconds
        gain = (now - then) * self._pace.of(self.plan)
        numbers = {"left": left, "gain": gain, "predicted_bytes": plan.predicted_bytes}
        numbers |= {"compiled_bytes": plan.compiled_bytes}
        if plan.actions == self.plan.actions and plan.places == self.plan.places:
            return None, [self._row(number, False, "the best plan is the same", **numbers)]
        if plan.places != self.plan.places:
            return None, [self._row(number, False, "states would lie elsewhere", **numbers)]
        if not self._over and gain * left <= 0:
            return None, [self._row(number, False, "the best plan is no faster", **numbers)]
        why = "; ".join(map(str, self._over)) or "the new plan is faster"
        row = self._row(number, True, why, **numbers) | {"event": "swap"}
        row["changed"] = changed(self.plan, plan)
        return self._swap(plan, step), [row]

    def told(self, seconds: float | None) -> None:
        """Takes what a step took, by the clock; beside planning it takes longer, and tells
        nothing.
        """
        if seconds is not None and self._made is None:
            self._pace.told(seconds)

    def less(self, number: int, error: BaseException) -> tuple[Any, list[dict[str, Any]]]:
        """Plans for less memory, after a step that ran out of it; returns its step and the
        decision's row. Raises BudgetError where no plan takes less, with what holds the memory.
        """
        less = int(LESS * min(self.plan.budget_bytes, self.plan.compiled_bytes))
        first = str(error).splitlines()[0][:300]
        try:
            plan, step = self._again.now(less, self.counts or None)
        except BudgetError as none:
            raise BudgetError(
                f"train: step {number} ran out of memory under a plan of"
                f" {show_bytes(self.plan.compiled_bytes)} ({first}), and no plan takes"
                f" {show_bytes(less)}; {none}\n{self._again.explained(self.plan)}",
                least_bytes=none.least_bytes,
            ) from error
        row = self._row(number, True, f"out of memory: {first}", budget_bytes=plan.budget_bytes)
        row |= {"event": "swap", "compiled_bytes": plan.compiled_bytes}
        row["changed"] = changed(self.plan, plan)
        return self._swap(plan, step), [row]

    def notes(self) -> dict[str, Any]:
        """What a checkpoint needs to go on under the same plan."""
        return {"plan": self.plan.to_json(), "recent": self._recent, "planned": self._made is None}

    def restore(self, notes: Mapping[str, Any]) -> Any:
        """Goes on from what `notes` said; returns the step, or None where it is the first plan's.

        Raises what `jaxmem.verify` raises, where the plan is of another model.
        """
        self._recent = [dict(counts) for counts in notes["recent"]]
        self._rooms = rooms(self.counts) if self._recent else None
        plan = Plan(**file.read(dict(notes["plan"]), "the checkpoint's plan"))
        step = None
        if plan.actions != self.plan.actions:
            step = self._swap(plan, self._again.executable(plan))
            self._before = None
        if not notes["planned"]:
            self._made = self._again.begin(self.plan.budget_bytes, self.counts)
        return step

    def close(self) -> None:
        """Lets what is being planned go, once a compile that goes on has ended."""
        self._again.close()

    def _slower(self, number: int) -> tuple[Any, list[dict[str, Any]]] | None:
        """The step of the plan before, if the new one's steps are slower by the clock."""
        if self._before is None or (now := self._pace.median) is None:
            return None
        (plan, step, pace), self._before = self._before, None
        if pace.median is None:
            return None
        self._again.remember(self.plan, plan, now - pace.median, pace.noise + self._pace.noise)
        if step is None or self._over or now <= (1 + SLOWER) * pace.median:
            return None
        why = "its steps are slower than those of the plan before, which comes back"
        row = self._row(number, True, why, median=now, before=pace.median) | {"event": "swap"}
        row["changed"] = changed(self.plan, plan)
        found = self._swap(plan, step)
        self._before = None
        return found, [row]

    def _swap(self, plan: Plan, step: Any) -> Any:
        self._before = self.plan, self._step or self.plan._step, self._pace
        self.plan, self._step, self._pace = plan, step, Pace()
        return step

    def _row(self, number: int, taken: bool, why: str, **numbers: float) -> dict[str, Any]:
        measured = {} if self._pace.median is None else {"step_seconds": self._pace.median}
        predicted = {"predicted_seconds": self.plan.predicted_seconds}
        return {"step": number, "taken": taken, "why": why} | predicted | measured | numbers


def changed(plan: Plan, other: Plan) -> dict[str, str]:
    """What another plan does otherwise: block/tag -> "this -> that"."""
    found: dict[str, str] = {}
    for label in sorted({*plan.actions, *other.actions}):
        was, is_now = plan.actions.get(label, {}), other.actions.get(label, {})
        for tag in sorted({*was, *is_now}):
            if was.get(tag) != is_now.get(tag):
                found[f"{label}/{tag}"] = f"{was.get(tag, 'absent')} -> {is_now.get(tag, 'absent')}"
    return found
