"""Chooses the size of a minibatch, or a context length: the largest size that fits, or the fastest.

A local search finds the assignment of least bytes at one size. The bytes of this assignment are
nearly affine in the size, so that liveness estimates and few compiles of it bracket the largest
size that fits. Only the sizes that decide the result are planned: the size that the bracket names,
and the next size, which a whole search refuses.

The first choice was to plan each size that a bisection tried. Each size near the least bytes then
took a local search of its own, and the last size that did not fit took two searches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxmem._core.actions import Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.bytes import show_bytes
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.options import Allowed
from jaxmem._model.states.places import DEVICE, DIVIDED, HOST, Places
from jaxmem._planner.microbatches import checked as checked_numbers
from jaxmem._planner.placement.plan import SHARDING, STATES
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._planner.search.history import History
from jaxmem._planner.search.least import least
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.traced_step import read_step
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.protocol import Backend, Pricing
from jaxmem._trace.arguments import argument_bytes, is_function, shards_of, sized
from jaxmem.errors import BudgetError, JaxmemError, OptimizerError, StepError

GOALS = ("max", "fastest")
PROBED = 11  # powers of two that are tried; the first size that the step can be traced for is least
MOST_SIZES = 2**20


def check_batch(batch: str | None, sizes: Sequence[int] | None, args: tuple) -> None:
    """Raises StepError for an invalid `batch` or `sizes`, and if no argument is a function of a
    size.
    """
    if batch is None and sizes is None:
        return
    if not isinstance(batch, str) or batch not in GOALS:
        raise StepError(
            f"plan: `batch` is {batch!r}; expected 'max' for the largest size that fits, or"
            " 'fastest' for the one of the highest throughput; `sizes` says which may be taken"
        )
    check_sized(args, f"plan: `batch` is {batch!r}")
    if sizes is not None:
        checked_sizes(sizes, "plan: `sizes`")


def check_sized(args: tuple, what: str) -> None:
    """Raises StepError if no argument is a function of a size.

    what: the start of the error's sentence, which names the argument of the public function.
    """
    if not any(map(is_function, args)):
        raise StepError(
            f"{what}, and none of the step's arguments is a function of a size; expected one in"
            " place of the batch, such as lambda n: jax.ShapeDtypeStruct((n, 1024), jnp.int32)"
        )


def checked_sizes(sizes: Sequence[int], what: str) -> Sequence[int]:
    """The sizes in ascending order, each once. Raises StepError for invalid sizes.

    what: the public function and the argument that the error names.
    """
    is_size = lambda n: isinstance(n, int) and not isinstance(n, bool) and n > 0
    listed = isinstance(sizes, Sequence) and sizes and not sizes[MOST_SIZES:]
    if not listed or not all(map(is_size, sizes)):
        raise StepError(
            f"{what} is {str(sizes)[:80]}; expected whole numbers of at least 1, and at most"
            f" {MOST_SIZES} of them, such as range(8, 4097, 8)"
        )
    return sorted(set(sizes))


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Bytes of a step as a function of its size, by liveness estimates of its traces.

    build: takes a plan, and returns the step.
    args: the step's arguments, functions of a size among them.
    backend: estimates the step's temporary bytes.
    limits: the bytes that a plan may take.
    decide: the argument `decide` of `plan`.
    allowed: the actions and codecs to choose from.
    smallest: the assignment of least bytes that is known.
    """

    build: Any
    args: tuple
    backend: Backend
    limits: Limits
    decide: Collection[str]
    allowed: Allowed
    smallest: Assignment = dataclasses.field(default_factory=Assignment.nothing)

    def least(self, size: int) -> int:
        """Bytes under `smallest`, and with states in host memory if states are placed."""
        return self._bytes(size, self.smallest)

    def kept(self, size: int) -> int:
        """Bytes with everything kept on the device."""
        return self._bytes(size, Assignment.everything())

    def searched(self, size: int) -> "StepSizes | None":
        """A copy with the assignment of least bytes that a local search finds for a size; None if
        states are placed, or if the bytes of the arguments alone exceed the limits.
        """
        if STATES in self.decide:
            return None
        LOG.info("searching for the least bytes at size %d", size)
        compiler = StepCompiler(self.build, sized(self.args, size), self.backend)
        try:
            # Seconds have no influence on the least bytes, so that no piece of the step is timed.
            step = read_step(compiler, self.limits, self.allowed, Pricing(self.backend.target))
        except BudgetError:
            return None
        found, *_ = least(step.search(self.limits))
        return self.under(found.actions)

    def under(self, actions: Actions) -> "StepSizes":
        """A copy with an assignment whose bytes are known to be small."""
        decided = {label: choices for label, choices in actions.items() if choices}
        # Blocks through which no gradient runs have no choices, and are recomputed.
        return dataclasses.replace(self, smallest=Assignment(decided, others={}))

    def compiled(self, *sizes: int) -> list[int]:
        """Compiled bytes under `smallest` for the first of `sizes`, as many as compile at the same
        time; more than the usable bytes if host memory is exceeded. The compiles are stored for the
        searches of these sizes. Raises StepError if XLA fails.
        """
        sizes, backend = sizes[: self.backend.parallel_compiles], self.backend
        LOG.info("compiling the least bytes at size %s", " and ".join(map(str, sizes)))
        compilers = [StepCompiler(self.build, sized(self.args, n), backend) for n in sizes]
        futures = [backend.compile_buffers(*c.stages(self.smallest)) for c in compilers]
        actions = {label: dict(choices) for label, choices in self.smallest.actions.items()}
        steps = [CompiledStep(actions, future.result()) for future in futures]
        for compiler, step in zip(compilers, steps):
            History(backend, compiler.trace(Assignment.nothing()).jaxpr).remember(step)
        most = self.limits.usable_bytes
        return [max(s.total, 0 if self.limits.allow(s) else most + 1) for s in steps]

    def _bytes(self, size: int, plan: Assignment) -> int:
        args = sized(self.args, size)
        if STATES in self.decide:
            return self._of_placed(args, plan)
        traced = StepCompiler(self.build, args, self.backend).sized(plan)
        devices = self.backend.target.devices
        shards = shards_of(traced, args, devices)
        temporary = self.backend.temporary_bytes(traced, shards, args=args)
        return argument_bytes(traced, args, devices) + temporary

    def _of_placed(self, args: tuple, plan: Assignment) -> int:
        """Bytes of a step whose states are placed, divided over devices as finely as the step's
        optimizer allows.
        """
        refused = None
        for how in reversed(DIVIDED) if SHARDING in self.decide else [None]:
            try:
                steps = PlacedSteps(self.build, args, self.backend, how)
                return steps.estimate(
                    plan, _places(steps, None if plan == Assignment.everything() else self.limits)
                )
            except OptimizerError as error:
                refused = error
        assert refused is not None
        raise refused


def _places(steps: PlacedSteps, limits: Limits | None) -> Places:
    """Places with as many layers in host memory as the host limit allows. Without limits, all
    layers are in device memory.
    """
    states = steps.states()
    if limits is None or not states.layer:
        return Places(states.layers, states.layers)
    outside = states.outside if states.outside <= limits.host_bytes else 0
    streamed = min(states.layers, (limits.host_bytes - outside) // states.layer)
    return Places(
        states.layers, states.layers - streamed, outer_moments=HOST if outside else DEVICE
    )


def possible(
    step_sizes: StepSizes, sizes: Sequence[int] | None, microbatches: Sequence[int] | None
) -> Sequence[int]:
    """The candidate sizes: `sizes` if given, else the multiples of a base size. The base size is
    the first of m, 2m, 4m, ... for which the step can be traced, where m is the least common
    multiple of the numbers of microbatches and of devices.

    Raises StepError if the step can be traced for none of the first `PROBED` base sizes.
    """
    if sizes is not None:
        return checked_sizes(sizes, "plan: `sizes`")
    numbers = [1] if microbatches is None else checked_numbers(microbatches)
    each = math.lcm(*numbers, step_sizes.backend.target.devices)
    tried, last = [each << i for i in range(PROBED)], None
    for size in tried:
        try:
            step_sizes.least(size)
        except JaxmemError as error:
            last = error
        else:
            return range(size, size * MOST_SIZES + 1, size)
    raise StepError(
        f"plan: the step cannot be traced for any of the sizes {', '.join(map(str, tried))};"
        f" expected `sizes` that it takes, such as range(8, 4097, 8): {last}"
    ) from last


SPREAD = 5  # the number of sizes that are planned to find the fastest size
# A failed size is planned again if its least bytes are within this multiple of the room.
NEAR = 1.25
FURTHER = 4  # the factor by which successive steps of a search grow
ROUNDS = 6  # the most rounds of compiles that bracket the largest size


def within(count: int, bytes_of: Callable[[int], float], room: float) -> int:
    """The last of `count` indices whose bytes are at most `room`; -1 if there is no such index.
    Bytes must grow with the index.
    """
    low, high, iteration = -1, count, 0
    at = functools.cache(bytes_of)
    while high - low > 1:
        middle = (low + high) // 2
        if high == count:  # no index is known whose bytes exceed the room
            middle = min(max(low + 1, FURTHER * (low + 1) - 1), count - 1)
        # Bytes are nearly proportional to the size, so interpolate. Every third iteration halves
        # the interval, so that the loop ends soon if bytes are not proportional.
        elif iteration % 3 < 2:
            share = (room - at(low)) / (at(high) - at(low))
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        iteration += high < count
        low, high = (middle, high) if at(middle) <= room else (low, middle)
    return low


class Boundary:
    """Finds the largest size that fits, whose next larger size does not fit.

    sizes: candidate sizes in ascending order.
    least: the estimated bytes of the smallest plan for a size.
    room: bytes that a plan may take.
    plan_at: makes the plan for a size, or raises BudgetError.
    probe: the step with the assignment of least bytes for a size; None if no assignment is compiled
      at other sizes than its own.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        least: Callable[[int], int],
        room: int,
        plan_at: Callable[[int], Plan],
        probe: Callable[[int], StepSizes | None] = lambda size: None,
    ):
        self.sizes, self.room, self._plan_at, self._probe = sizes, room, plan_at, probe
        self._least = functools.cache(lambda i: least(sizes[i]))
        self.plans: dict[int, Plan] = {}
        self.failures: dict[int, BudgetError] = {}
        self._retried: dict[int, BudgetError] = {}  # failures that were planned once more
        self._learned: dict[int, float] = {}  # least bytes by index
        self._smallest: StepSizes | None = None  # with the assignment of least bytes at one size
        self._probed: set[int] = set()  # sizes at which an assignment of another size is compiled

    def find(self) -> int:
        """The index of the largest size that fits, whose next larger size does not fit.

        Raises BudgetError if the smallest size does not fit, with its least bytes.
        """
        self._bracket()
        # The first size after a probed size that does not fit is not likely to fit either.
        fits, fails, step = -1, len(self.sizes), 1 / FURTHER if self._probed else 1
        while (retry := self._may_fit_after_all(fails, fails - fits == 1)) or fails - fits > 1:
            index = within(len(self.sizes), self._expected, self.room)
            if retry:
                self._retried[fails] = self.failures.pop(fails)
                index = fails
            up, outside = index <= fits, not retry and not fits < index < fails
            if outside:
                further = fits + max(1, int(step)) if up else fails - max(1, int(step))
                index = further if fits < further < fails else (fits + fails) // 2
            plan = self.plan(index)
            if outside:  # a step the other way is a small one again
                step = step * FURTHER if up == (plan is not None) else 1
            if plan is not None:
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
                least_budget=error.least_budget,
            ) from error
        return fits

    def _bracket(self) -> None:
        """Compiles the assignment of least bytes at sizes near the largest size that fits, until it
        fits a size and does not fit the next size.
        """
        index = within(len(self.sizes), self._least, self.room)
        if index + 1 == len(self.sizes):  # the last size is expected to fit
            return
        self._smallest = probe = self._probe(self.sizes[max(0, index)])
        if probe is None:
            return
        self._least = functools.cache(lambda i: probe.least(self.sizes[i]))
        for _ in range(ROUNDS):
            index = within(len(self.sizes), self._expected, self.room)
            near = [i for i in (index, index + 1) if 0 <= i < len(self.sizes)]
            near = [i for i in near if i not in self._probed]
            if not near or not self._compile(probe, near):
                return

    def _compile(self, step: StepSizes, indices: Sequence[int]) -> bool:
        """Compiles an assignment at several sizes, and learns its bytes. Returns False if XLA fails
        to compile it.
        """
        try:
            found = step.compiled(*(self.sizes[i] for i in indices))
        except StepError:  # XLA may compile other assignments
            return False
        for i, size in zip(indices, found):
            self._learned[i] = min(size, self._learned.get(i, size))
            self._probed.add(i)
        return True

    def plan(self, index: int) -> Plan | None:
        """The plan for a size, made once; None if no plan fits."""
        if index in self.plans or index in self.failures:
            return self.plans.get(index)
        other = self.plans.get(max((i for i in self.plans if i < index), default=-1))
        # The search of a size begins with the assignment that fits a smaller size. No assignment
        # describes a step as written.
        if self._smallest and other and not other.as_written and index not in self._probed:
            self._compile(self._smallest.under(other.actions), [index])
        LOG.info("planning for size %d", self.sizes[index])
        try:
            plan = self._plan_at(self.sizes[index])
        except BudgetError as error:
            # An error without bytes does not mean that the size is too large.
            if error.least_bytes is None:
                raise
            self.failures[index] = error
            self._learned[index] = max(error.least_bytes, self.room + 1)
            return None
        self.plans[index] = plan
        if plan.points:
            self._learned[index] = min(self.room, *(point.bytes for point in plan.points))
        return plan

    def _may_fit_after_all(self, index: int, is_last: bool) -> bool:
        """Whether to plan a size once more for which no plan fitted. The size is planned again if
        it fits by the bytes of the plans that fit. It is also planned again if the search would end
        here, and its least bytes were near the room. The second search begins with the compiles of
        the first. A probed size is planned once: its first search begins with the probe's compile.
        """
        if index not in self.failures or index in self._retried or index in self._probed:
            return False
        if is_last and (self.failures[index].least_bytes or 0) <= NEAR * self.room:
            return True
        of_plans = {i: least for i, least in self._learned.items() if i in self.plans}
        return bool(of_plans) and self._corrected(of_plans, index) <= self.room

    def _expected(self, index: int) -> float:
        """Bytes of the smallest plan for a size, by all sizes that were planned."""
        return self._corrected(self._learned, index)

    def _corrected(self, learned: Mapping[int, float], index: int) -> float:
        """Bytes of the smallest plan: the estimate, corrected by a line through the two nearest
        sizes that were planned. If only one size was planned, its error is added to every estimate.
        """
        estimate = self._least(index)
        nearest = sorted(learned, key=lambda i: abs(i - index))[:2]
        if not nearest:
            return estimate
        pairs = sorted((self._least(i), learned[i]) for i in nearest)
        (low, least), (high, most) = pairs[0], pairs[-1]
        slope = (most - least) / (high - low) if high > low and most > least else 1.0
        base = nearest[0]
        return learned[base] + slope * (estimate - self._least(base))

    def beyond(self, index: int) -> tuple[str, ...]:
        """A sentence for the user about the next larger size, if it did not fit."""
        if (error := self.failures.get(index + 1)) is None:
            return ()
        needed = show_bytes(error.least_bytes or 0)
        return (f"the next size, {self.sizes[index + 1]}, needs {needed} at the least",)


def fastest_index(boundary: Boundary, kept: Callable[[int], int]) -> int:
    """The index of the size with the highest predicted throughput. Throughput is assumed to grow
    with the size as long as everything kept fits. From the largest such size to the largest size
    that fits, at most `SPREAD` evenly spaced sizes are planned.

    kept: the estimated bytes of the step with everything kept, for a size.
    """
    most, first = boundary.find(), 0
    if most >= SPREAD:
        kept_bytes = lambda i: kept(boundary.sizes[i])
        first = max(0, within(most + 1, kept_bytes, boundary.room))
    number = min(SPREAD, most - first + 1)
    for i in range(number):
        boundary.plan(first + (most - first) * i // max(1, number - 1))
    plans = boundary.plans
    # A step without a price of any piece has no predicted time, and counts as the slowest.
    throughput = lambda i: boundary.sizes[i] / (plans[i].predicted_seconds or math.inf)
    return max(plans, key=throughput)


def of_size(batch: str, boundary: Boundary, kept: Callable[[int], int]) -> Plan:
    """The plan of the largest size if `batch` is "max", else the plan of the fastest size."""
    index = boundary.find() if batch == "max" else fastest_index(boundary, kept)
    plan = boundary.plans[index]
    notes = (*plan.notes, *boundary.beyond(index))
    return dataclasses.replace(plan, batch=boundary.sizes[index], notes=notes)
