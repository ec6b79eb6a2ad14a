"""Names the buffers of a compiled step: every allocation, temporaries at their peak, and
temporaries over the schedule.

An allocation is one contiguous piece of memory. A buffer holds one value, and has a slice of an
allocation: an offset and a size. Buffers that are not alive at the same time share slices. XLA
dumps the assignment and the optimized module as one `HloProto`; field numbers are from
xla/service/hlo.proto.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from jaxmem._target.buffers.assignment import (
    ALIASED,
    CONSTANT,
    INDEX,
    IS_ARGUMENT,
    IS_TUPLE,
    LIVE_OUT,
    SIZE,
    THREAD_LOCAL,
    BufferAssignment,
    Moment,
    Stay,
    fullest_moments,
    schedule,
)
from jaxmem._target.buffers.held_buffers import POINTS, Held, Life, Peak
from jaxmem._target.buffers.module import Module, Position
from jaxmem._target.buffers.proto import Message
from jaxmem.errors import StepError


def peak(hlo_proto: bytes, leave_out: Callable[[Message], bool] = lambda _: False) -> Peak:
    """Returns what each allocation of the step in a serialized `HloProto` holds, constants and
    thread-local memory left out.

    leave_out: whether an allocation is in a memory that no budget is about.

    Device bytes add up to temp + arguments + outputs - aliased of the step's memory analysis.
    Raises StepError if the bytes are no such message, or lack its module or its buffer assignment.
    """
    try:
        message = Message(hlo_proto)  # HloProto: the module is field 1, the assignment field 3
        module, assignment = Module(message.message(1)), BufferAssignment(message.message(3))
        if not (module.instructions and assignment.allocations):
            raise ValueError("there is no module or no buffer assignment in it")
        assignment.allocations = [a for a in assignment.allocations if not leave_out(a)]
        return _peak(module, assignment, schedule(message.message(1), module))
    except (ValueError, KeyError, IndexError) as error:
        raise StepError(
            f"explain: XLA's buffer assignment ({len(hlo_proto)} bytes) cannot be read:"
            f" {type(error).__name__}: {error}; expected a serialized HloProto, as"
            " xla_dump_hlo_as_proto writes it; this version of jaxlib may write another"
        ) from error


def _peak(module: Module, assignment: BufferAssignment, order: Mapping[str, int]) -> Peak:
    """Names every allocation that counts. `order`: by an instruction's name, its position in the
    schedule.

    Temporaries of one allocation share its bytes over time. So only temporaries that are alive at
    its fullest moment are listed, and the rest of the allocation is packing.
    """
    temporary = lambda size, host, buffers: _held(
        module, "temporary", size, host, assignment.positions_of(sorted(buffers))
    )
    held: list[Held] = []
    at_peak: dict[int, Held] = {}  # the temporaries of the device among them, by a buffer's id
    stays: list[Stay] = []
    always: list[Held] = []
    moments: dict[Moment, str] = {}
    # The largest temporary allocation of the device: the step's peak is where that one is fullest.
    at, fullest = None, -1
    for a in assignment.allocations:
        size, slices = a.number(SIZE), assignment.slices[a.number(INDEX)]
        if a.number(THREAD_LOCAL) or a.number(CONSTANT) or not size:
            continue  # temp + arguments + outputs count none of these
        positions = assignment.positions_of(slices)
        host = any(module.array(position).host for position in positions)
        if a.number(IS_ARGUMENT):
            # A donated argument's memory later holds an output too: name it after the argument.
            own = [p for p in positions if p[0] in module.parameters]
            held.append(_held(module, "argument", size, host, own or positions))
        if a.number(LIVE_OUT) and not a.number(ALIASED):  # not in a donated argument's memory
            index = next((i for i, p in enumerate(module.outputs) if p in positions), None)
            if a.number(IS_TUPLE):
                # Pointers to the outputs, where a step has several.
                held.append(Held("output", size, host, "tuple", op="the table of outputs"))
            else:
                output = _held(module, "output", size, host, positions[-1:])
                held.append(dataclasses.replace(output, index=index))
        if a.number(IS_ARGUMENT) or a.number(LIVE_OUT):
            continue
        # What remains are temporaries.
        live, instruction, _ = assignment.fullest(a.number(INDEX))
        if size > fullest and not host:
            at, fullest = instruction, size
        free = size
        for got, buffers in _disjoint((slices[b], b) for b in live):
            held.append(temporary(got, host, buffers))
            at_peak |= {} if host else dict.fromkeys(buffers, held[-1])
            free -= got
        if free:
            held.append(Held("packing", free, host))
        if not host:
            stayed, seen = assignment.stays(a.number(INDEX), order)
            stays, moments = stays + stayed, moments | seen
            if not stayed:  # no trace has its history
                always += [at_peak[b] for b in live]
    fullest_points = fullest_moments(stays, moments, POINTS)
    points = [_origin(module, moments[moment]) for moment in fullest_points]
    lives = _lives(stays, fullest_points, at_peak, temporary)
    # What has no history is taken to be there all the time.
    lives += [Life(h, 0, len(points) - 1) for h in dict.fromkeys(always)] if points else []
    where = _origin(module, at or "")
    return Peak(*where, tuple(held), len(moments), tuple(points), tuple(lives))


def _origin(module: Module, instruction: str) -> tuple[str, tuple[str, ...]]:
    """The JAX operation of an instruction, and the loops round it; ("", ()) if it is unknown."""
    if (at := module.by_name.get(instruction)) is None:
        return "", ()
    return module.instructions[at].op, tuple(module.loops(at))


def _lives(
    stays: list[Stay], points: list[Moment], at_peak: Mapping[int, Held], temporary: Callable
) -> list[Life]:
    """Names what stays when.

    stays: of all temporary allocations of the device.
    points: the moments of the schedule's points.
    at_peak: the buffers alive at the peak, by id.
    temporary: describes temporary buffers that share memory, by their bytes, whether they are in
      host memory, and their ids.
    """
    lives = []
    for stay in stays:
        first = bisect.bisect_left(points, stay.first)
        last = bisect.bisect_right(points, stay.last) - 1
        if first > last:
            continue
        same = next((at_peak[b] for b in sorted(stay.buffers) if b in at_peak), None)
        whole = temporary(stay.bytes, False, stay.buffers)
        lives.append(Life(same or whole, first, last, whole.handed_on))
    return lives


def _held(module: Module, kind: str, size: int, host: bool, positions: list[Position]) -> Held:
    """Describes the `size` bytes that the values at `positions` share.

    The buffer has the origins of all its values, and the shape and the dtype of the last value. Its
    operation is the operation of the last value for which XLA names any.
    """
    origins = [o for position in positions for o in module.origins(position)]
    array = module.array(positions[-1])
    ops = [module.instructions[at].op for at, _ in positions]
    return Held(
        kind=kind,
        bytes=size,
        host=host,
        dtype=array.dtype,
        shape=array.shape,
        op=next((op for op in reversed(ops) if op), ""),
        sources=tuple(dict.fromkeys(o.op for o in origins if o.op)),
        loops=tuple(module.loops(positions[-1][0])),
        handed_on=tuple(
            dict.fromkeys(loop for position in positions for loop in module.handed_on(position))
        ),
    )


def _disjoint(slices: Iterable[tuple[tuple[int, int], int]]) -> Iterator[tuple[int, list[int]]]:
    """Yields the bytes and the buffers of each slice, without counting a byte twice: if two
    slices overlap, the later slice gets the bytes that are left.

    slices: (offset, size) of each buffer, and the buffer's id.
    """
    shared: dict[tuple[int, int], list[int]] = {}
    for position, buffer in slices:
        shared.setdefault(position, []).append(buffer)
    end = 0  # bytes below it are counted
    # By offset, and the largest first: a slice inside a larger slice then adds nothing.
    for (offset, size), buffers in sorted(shared.items(), key=lambda s: (s[0][0], -s[0][1])):
        got = offset + size - max(end, offset)
        if got > 0:
            end = offset + size
            yield got, buffers
