"""XLA's buffer assignment: allocations, the slice of an allocation that each buffer has, and the
heap simulation, which records when each buffer is alive. Sums up a program's bytes in each memory.

Field numbers are from xla/service/hlo.proto.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxmem._target.buffers.module import Module, Position
from jaxmem._target.buffers.proto import Message
from jaxmem._target.hlo.text import HOST
from jaxmem.errors import StepError

# Fields of BufferAllocationProto. THREAD_LOCAL: it is on no heap. LIVE_OUT: the step may return the
# values stored there. COLOR: the memory of the allocation. ALIASED: it is an argument's memory,
# into which an output is written.
INDEX, SIZE, THREAD_LOCAL, IS_ARGUMENT, LIVE_OUT, COLOR = 1, 2, 3, 5, 7, 8
IS_TUPLE, CONSTANT, ALIASED = 11, 12, 13
DEVICE = 0  # a colour, as HOST; a TPU's others are memories of its cores

_ALLOC, _FREE = 0, 1  # of HeapSimulatorTrace.Event.Kind; the third, 2, shares a buffer's memory

Slice = tuple[int, int]  # an offset in an allocation, and a size
Event = tuple[int, int, str]  # its kind, the buffer's id, and the name of an instruction
Moment = tuple[int, int]  # an instruction's position in the schedule, and the number of an event
# among the events that a trace has at this position


class Stay(NamedTuple):
    """Bytes of a temporary allocation that several buffers use one after the other, from the first
    buffer's allocation until the last buffer is freed.

    buffers: their ids.
    bytes: bytes of the largest buffer.
    first, last: the moments between which it is alive, both included.
    """

    buffers: frozenset[int]
    bytes: int
    first: Moment
    last: Moment


class BufferAssignment:
    """A `BufferAssignmentProto`.

    positions: where each buffer's value is defined, by the buffer's id.
    allocations: as they were written.
    slices: by an allocation's index, the slice of each of its buffers by the buffer's id.
    """

    def __init__(self, message: Message):
        self.positions: dict[int, Position] = {}
        for b in message.messages(1):  # LogicalBufferProto: id is 1, defined_at is 3
            where = b.message(3)  # instruction_id is 4, shape_index is 3
            self.positions[b.number(1)] = where.number(4), tuple(where.numbers(3))
        self.allocations = list(message.messages(3))
        # Field 9 is `assigned`: a buffer's id, an offset, a size.
        self.slices = {
            a.number(1): {s.number(1): (s.number(2), s.number(3)) for s in a.messages(9)}
            for a in self.allocations
        }
        # HeapSimulatorTrace: for each event its kind, the buffer's id, and the instruction's name.
        self._traces: list[list[Event]] = [
            [(e.number(1), e.number(2), e.text(4)) for e in trace.messages(1)]
            for trace in message.messages(4)
        ]

    def positions_of(self, buffers: Iterable[int]) -> list[Position]:
        """Returns where each of the buffers is defined."""
        return [self.positions[b] for b in buffers]

    def stays(
        self, allocation: int, order: Mapping[str, int]
    ) -> tuple[list[Stay], dict[Moment, str]]:
        """Returns the buffers in `allocation` with the moments of their lives, and the name of the
        instruction at each moment at which a buffer is allocated. Both are empty if no trace has
        the allocation's history.

        order: by an instruction's name, its position in the schedule.
        """
        slices, trace = self.slices[allocation], self.fullest(allocation)[2]
        found: list[Stay] = []
        moments: dict[Moment, str] = {}
        # By offset: the buffers that are alive, all buffers since the offset was last empty, and
        # the first one's moment. Buffers at one offset are alive at once only if they share memory.
        open_: dict[int, tuple[set[int], set[int], Moment]] = {}
        now, freed = (-1, 0), True
        for kind, buffer, name in trace:
            if buffer not in slices:
                continue
            offset = slices[buffer][0]
            if kind == _FREE:
                freed = True
                alive, seen, first = open_.get(offset, (set(), set(), now))
                alive.discard(buffer)
                if seen and not alive:
                    found.append(_stay(seen, slices, first, now))
                    del open_[offset]
                continue
            # At each position XLA allocates first and frees then.
            if freed or name != moments.get(now):
                position = max(now[0], order.get(name, now[0]))
                now, freed = (position, now[1] + 1 if position == now[0] else 0), False
                moments[now] = name
            alive, seen, _ = open_.setdefault(offset, (set(), set(), now))
            alive.add(buffer)
            seen.add(buffer)
        found += [_stay(seen, slices, first, now) for _, seen, first in open_.values()]
        return found, moments

    def fullest(self, allocation: int) -> tuple[set[int], str, list[Event]]:
        """Returns the buffers that are alive when `allocation` is fullest, the name of the
        instruction that runs then, and the trace that has them.

        If no trace has its history, all its buffers count as alive.
        """
        slices = self.slices[allocation]
        best, most, at, told = set(slices), -1, "", []
        for trace in self._traces:
            # The living buffers of each slice. One slice may have several, which share its memory:
            # its bytes count from the first that appears to the last that goes.
            alive: dict[Slice, set[int]] = collections.defaultdict(set)
            now = 0  # bytes that are alive
            for kind, buffer, instruction in trace:
                if buffer not in slices:
                    continue
                here = alive[slices[buffer]]
                before = bool(here)
                here.discard(buffer) if kind == _FREE else here.add(buffer)
                now += slices[buffer][1] * (bool(here) - before)  # by 1, 0 or -1 times its size
                if kind != _FREE and now > most:
                    best, most, at = set().union(*alive.values()), now, instruction
                    told = trace
        return best, at, told


def _stay(buffers: set[int], slices: Mapping[int, Slice], first: Moment, last: Moment) -> Stay:
    """Returns the stay of buffers that share memory: as large as the largest of them."""
    return Stay(frozenset(buffers), max(slices[b][1] for b in buffers), first, last)


def fullest_moments(stays: Iterable[Stay], moments: Iterable[Moment], count: int) -> list[Moment]:
    """Returns the fullest moment of each of `count` equal ranges; of fewer moments, all."""
    order = sorted(moments)
    position = {moment: i for i, moment in enumerate(order)}
    changes = [0] * (len(order) + 1)
    for stay in stays:
        changes[position[stay.first]] += stay.bytes
        changes[position[stay.last] + 1] -= stay.bytes
    bytes_ = list(itertools.accumulate(changes))
    count = min(count, len(order))
    ends = [len(order) * i // count for i in range(count + 1)] if count else [0]
    return [order[max(range(a, b), key=bytes_.__getitem__)] for a, b in itertools.pairwise(ends)]


def schedule(message: Message, module: Module) -> dict[str, int]:
    """Returns by an instruction's name its position in the order in which the step runs, where the
    computations that it calls come before it, a loop's once; nothing where no order is written.

    message: the `HloModuleProto`.
    """
    # Its field 7 is the schedule: by a computation's id (1) the ids of its instructions (2: 1).
    sequences = {e.number(1): e.message(2).numbers(1) for e in message.message(7).messages(1)}
    order: dict[str, int] = {}
    entered: set[int] = set()  # a damaged file may call in circles
    todo: list[tuple[int, bool]] = [(module.entry, True)]  # computations, and instructions that end
    while todo:
        at, is_computation = todo.pop()
        if not is_computation:
            order[module.instructions[at].name] = len(order)
        elif at not in entered:
            entered.add(at)
            for i in reversed(sequences.get(at, ())):
                todo.append((i, False))
                # A loop's body stands before its condition, which runs first.
                todo += [(called, True) for called in module.instructions[i].called]
    return order


def bytes_of_memories(hlo_proto: bytes) -> dict[str, Any]:
    """Returns the fields of bytes of a `Compiled`, by the buffer assignment in a serialized
    `HloProto` of a TPU's. Thread-local allocations are on no heap, and count nowhere.

    Raises StepError if there is no buffer assignment in it.
    """
    try:
        assignment = BufferAssignment(Message(hlo_proto).message(3))
        if not assignment.allocations:
            raise ValueError("there is no buffer assignment in it")
        host = _bytes_in(assignment, HOST)["total_bytes"]
        return _bytes_in(assignment, DEVICE) | {"host_bytes": host}
    except (ValueError, KeyError, IndexError) as error:
        raise StepError(
            f"the TPU compiler's buffer assignment ({len(hlo_proto)} bytes) cannot be read:"
            f" {type(error).__name__}: {error}; expected a serialized HloProto: this version of"
            " libtpu may write another, the one that jax asks for is known to work"
        ) from error


def on_core(allocation: Message) -> bool:
    """Whether a TPU's allocation is in memory of its cores, which no budget is about."""
    return allocation.number(COLOR) not in (DEVICE, HOST)


def _bytes_in(assignment: BufferAssignment, color: int) -> dict[str, int]:
    """The fields of bytes of a `Compiled`, in one memory."""
    allocations = [
        a for a in assignment.allocations if a.number(COLOR) == color and not a.number(THREAD_LOCAL)
    ]
    total = lambda counts: sum(a.number(SIZE) for a in allocations if counts(a))
    return {
        "total_bytes": total(lambda a: True),
        "argument_bytes": total(lambda a: a.number(IS_ARGUMENT)),
        "output_bytes": total(lambda a: a.number(LIVE_OUT)),
        "alias_bytes": total(lambda a: a.number(IS_ARGUMENT) and a.number(LIVE_OUT)),
        "temp_bytes": total(lambda a: not a.number(IS_ARGUMENT) and not a.number(LIVE_OUT)),
    }
