"""Finds the largest size that fits, or the fastest, with few plans: estimates say what to expect of
a size, and what a plan compiled to corrects them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._core.progress import LOG
from jaxmem._result.plan.plan import Plan
from jaxmem.errors import BudgetError

SPREAD = 5  # sizes of which the fastest is taken
NEAR = 1.25  # of the room: by how much a search's last guess may be off
FURTHER = 4  # times as far as before, where nothing is known of what lies there


def within(count: int, bytes_of: Callable[[int], float], room: float) -> int:
    """The last of `count` indices whose bytes are within the room, -1 where none is; bytes are
    taken to grow with the index.
    """
    low, high, known = -1, 0, {}
    at = lambda i: known.setdefault(i, bytes_of(i)) if i not in known else known[i]
    while high < count and at(high) <= room:
        low, high = high, max(high + 1, FURTHER * (high + 1) - 1)
        if high >= count > low + 1:
            high = count - 1
    for turn in itertools.count():
        if high - low <= 1 or high >= count:
            return low
        middle = (low + high) // 2
        if low >= 0 and turn % 3 < 2:  # bytes are nearly proportional; halves end it where not
            share = (room - at(low)) / (at(high) - at(low))
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (middle, high) if at(middle) <= room else (low, middle)
    raise AssertionError("unreachable")


class Boundary:
    """Finds where plans cease to fit, between two sizes that follow each other.

    sizes: in ascending order.
    least: bytes that are expected of the least plan for a size.
    room: bytes that a plan may take.
    plan_at: makes the plan for a size, or raises BudgetError.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        least: Callable[[int], int],
        room: int,
        plan_at: Callable[[int], Plan],
    ):
        self.sizes, self.room, self._plan_at = sizes, room, plan_at
        self._least = functools.cache(lambda i: least(sizes[i]))
        self.plans: dict[int, Plan] = {}
        self.failures: dict[int, BudgetError] = {}
        self._doubted: dict[int, BudgetError] = {}
        self._learned: dict[int, float] = {}  # least bytes by index

    def find(self) -> int:
        """The index of the largest size that fits, whose successor does not.

        Raises BudgetError where the least size does not fit, with its least bytes.
        """
        fits, fails, step = -1, len(self.sizes), 1
        while (again := self._is_doubted(fails, fails - fits == 1)) or fails - fits > 1:
            index = within(len(self.sizes), self._expected, self.room)
            if again:
                self._doubted[fails] = self.failures.pop(fails)
                index = fails
            elif not fits < index < fails:
                further = fits + step if index <= fits else fails - step
                index = further if fits < further < fails else (fits + fails) // 2
                step *= FURTHER
            if self.plan(index) is not None:
                fits = index
            fails = min((i for i in self.failures if i > fits), default=len(self.sizes))
        if fits < 0:
            error, size = self.failures[0], self.sizes[0]
            least = error.least_bytes
            assert least is not None
            raise BudgetError(
                f"plan: no size fits: {size}, the least of `sizes`, needs {show_bytes(least)}"
                f" ({least} bytes) at the least: {error}",
                least_bytes=least,
            ) from error
        return fits

    def plan(self, index: int) -> Plan | None:
        """The plan for a size, made once; None where it does not fit."""
        if index in self.plans or index in self.failures:
            return self.plans.get(index)
        LOG.info("planning for size %d", self.sizes[index])
        try:
            plan = self._plan_at(self.sizes[index])
        except BudgetError as error:
            # An error without bytes does not say that the size is too large.
            if error.least_bytes is None:
                raise
            self.failures[index] = error
            self._learned[index] = max(error.least_bytes, self.room + 1)
            return None
        self.plans[index] = plan
        if plan.points:
            self._learned[index] = min(self.room, *(point.bytes for point in plan.points))
        return plan

    def _is_doubted(self, index: int, is_last: bool) -> bool:
        """Whether a size may fit for which the planner found nothing: plans that fit say so, or the
        search would end here, and the least was near. The planner is asked once more, and begins
        with what it compiled.
        """
        if index not in self.failures or index in self._doubted:
            return False
        if is_last and (self.failures[index].least_bytes or 0) <= NEAR * self.room:
            return True
        of_plans = {i: least for i, least in self._learned.items() if i in self.plans}
        return bool(of_plans) and self._by(of_plans, index) <= self.room

    def _expected(self, index: int) -> float:
        """Bytes of the least plan for a size, by all that is known."""
        return self._by(self._learned, index)

    def _by(self, learned: Mapping[int, float], index: int) -> float:
        """Bytes of the least plan: those of an estimate, by a line through the two nearest sizes
        that were planned. What estimates are off is taken to be the same for all where only one
        was.
        """
        told = self._least(index)
        near = sorted(learned, key=lambda i: abs(i - index))[:2]
        if not near:
            return told
        pairs = sorted((self._least(i), learned[i]) for i in near)
        (low, least), (high, most) = pairs[0], pairs[-1]
        slope = (most - least) / (high - low) if high > low and most > least else 1.0
        where = near[0]
        return learned[where] + slope * (told - self._least(where))

    def beyond(self, index: int) -> tuple[str, ...]:
        """A sentence for the user about the size after this one, where it did not fit."""
        if (error := self.failures.get(index + 1)) is None:
            return ()
        needed = show_bytes(error.least_bytes or 0)
        return (f"the next size, {self.sizes[index + 1]}, needs {needed} at the least",)


def fastest(boundary: Boundary, kept: Callable[[int], int]) -> int:
    """The index of the size of the highest predicted throughput. Throughput is taken to grow as
    long as everything is kept; between the largest such size and the largest that fits a few are
    planned, all where there are few.

    kept: bytes that are expected of the step with everything kept, for a size.
    """
    most, first = boundary.find(), 0
    if most >= SPREAD:
        of = lambda i: kept(boundary.sizes[i])
        first = max(0, within(most + 1, of, boundary.room))
    number = min(SPREAD, most - first + 1)
    for i in range(number):
        boundary.plan(first + (most - first) * i // max(1, number - 1))
    throughput = lambda i: boundary.sizes[i] / boundary.plans[i].predicted_seconds
    return max(boundary.plans, key=throughput)


def of_size(batch: str, boundary: Boundary, kept: Callable[[int], int]) -> Plan:
    """The plan of the size that `batch` asks for."""
    index = boundary.find() if batch == "max" else fastest(boundary, kept)
    plan = boundary.plans[index]
    notes = (*plan.notes, *boundary.beyond(index))
    return dataclasses.replace(plan, batch=boundary.sizes[index], notes=notes)
