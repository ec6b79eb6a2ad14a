"""The sizes of a minibatch, or context lengths, that may be chosen, and what a step takes for each,
by liveness estimates of its traces.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from jaxmem._core.assignment import Assignment
from jaxmem._model.states.places import DEVICE, DIVIDED, HOST, Places
from jaxmem._planner.joint.steps import PlacedSteps
from jaxmem._planner.microbatches import checked as checked_numbers
from jaxmem._planner.placed import SHARDING, STATES
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.trial import Limits
from jaxmem._target.compile.protocol import Backend
from jaxmem._trace.arguments import argument_bytes, is_function, shards_of, sized
from jaxmem.errors import JaxmemError, OptimizerError, StepError

GOALS = ("max", "fastest")
PROBED = 11  # powers of two, of which the first that the step is traced for is the least size
MOST_SIZES = 2**20


def check_batch(batch: str | None, sizes: Sequence[int] | None, args: tuple) -> None:
    """Raises StepError for a `batch` or `sizes` that cannot be meant, or without a function among
    the arguments.
    """
    if batch is None and sizes is None:
        return
    if not isinstance(batch, str) or batch not in GOALS:
        raise StepError(
            f"plan: `batch` is {batch!r}; expected 'max' for the largest size that fits, or"
            " 'fastest' for the one of the highest throughput; `sizes` says which may be taken"
        )
    if not any(map(is_function, args)):
        raise StepError(
            f"plan: `batch` is {batch!r}, and none of the step's arguments is a function of a size;"
            " expected one in place of the batch, such as"
            " lambda n: jax.ShapeDtypeStruct((n, 1024), jnp.int32)"
        )
    if sizes is not None:
        _checked(sizes)


def _checked(sizes: Sequence[int]) -> Sequence[int]:
    """The sizes in ascending order, each once."""
    whole = lambda n: isinstance(n, int) and not isinstance(n, bool) and n > 0
    found = sorted(set(sizes)) if isinstance(sizes, Sequence) and all(map(whole, sizes)) else []
    if not found:
        raise StepError(
            f"plan: `sizes` is {sizes!r}; expected whole numbers of at least 1, such as"
            " range(8, 4097, 8)"
        )
    return found


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What a step takes by its size, by liveness estimates of its traces.

    build: takes a plan, and returns the step.
    args: the step's arguments, functions of a size among them.
    decide: the names of what is decided.
    """

    build: Any
    args: tuple
    backend: Backend
    limits: Limits
    decide: Collection[str]

    def least(self, size: int) -> int:
        """Bytes with everything recomputed, and states streamed where they may be."""
        return self._bytes(size, Assignment.nothing())

    def kept(self, size: int) -> int:
        """Bytes with everything kept on the device."""
        return self._bytes(size, Assignment.everything())

    def _bytes(self, size: int, plan: Assignment) -> int:
        args = sized(self.args, size)
        if STATES in self.decide:
            return self._of_placed(args, plan)
        traced = StepCompiler(self.build, args, self.backend).trace(plan)
        devices = self.backend.target.devices
        beside = self.backend.temporary_bytes(traced, shards_of(traced, args, devices))
        return argument_bytes(traced, args, devices) + beside

    def _of_placed(self, args: tuple, plan: Assignment) -> int:
        """The same where states are placed; of the ways to divide it, that which divides most."""
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
    """As many layers in host memory as it has room for; none of them without limits."""
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
    """The sizes that may be taken: those given, else multiples of the first that works, of the
    powers of two that numbers of microbatches and devices divide.

    Raises StepError where the step is traced for none of them.
    """
    if sizes is not None:
        return _checked(sizes)
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
