"""Reads XLA's buffer assignment: what every allocation of a compiled step holds, temporaries at
their peak.

An allocation is one contiguous piece of memory. A buffer is what holds one value, and lies in a
slice of an allocation: an offset and a size. Buffers that are not alive at the same time share
slices. XLA dumps the assignment beside the optimized module as one `HloProto`; field numbers are
those of xla/service/hlo.proto.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxmem._hlo.module import Module, Place
from jaxmem._hlo.proto import Message, read
from jaxmem.errors import StepError

_HOST_SPACE = 5  # xla::Layout::kHostMemorySpace
_ALLOC, _FREE = 0, 1  # of HeapSimulatorTrace.Event.Kind; the third, 2, shares a buffer's memory


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of one device that one buffer holds when its allocation is fullest.

    kind: "argument", "output" (apart from the arguments' own memory), "temporary", or "packing":
      what no buffer of a temporary allocation holds at its peak.
    bytes: those that no other `Held` counts.
    host: whether they lie in host memory.
    dtype: as XLA writes it, such as "bf16"; "" for packing.
    shape: the dimensions of the array.
    op: the JAX operation that made the buffer, by XLA's metadata; for an argument its name.
    sources: the JAX operations that compute what lies in it; for a loop's stack, those that compute
      what is stacked.
    loops: XLA's names of the loops round the instruction that makes it, innermost first.
    handed_on: the loops that pass it on, from one turn to the next or to a later loop.
    index: an output's position among the step's outputs, else -1.
    """

    kind: str
    bytes: int
    host: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    sources: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    handed_on: tuple[str, ...] = ()
    index: int = -1


@dataclasses.dataclass(frozen=True)
class Peak:
    """What every allocation of a compiled step holds, temporaries at their peak.

    op: the JAX operation at which the largest temporary allocation is fullest, "" if unknown.
    loops: XLA's names of the loops round that operation, innermost first.
    held: all that is held; device bytes add up to those of the step.
    """

    op: str
    loops: tuple[str, ...]
    held: tuple[Held, ...]

    @staticmethod
    def of(data: Mapping[str, Any]) -> "Peak":
        """Rebuilds a `Peak` from the JSON of its `dataclasses.asdict`, where tuples are lists."""
        held = [
            Held(**h | {k: tuple(h[k]) for k in ("shape", "sources", "loops", "handed_on")})
            for h in data["held"]
        ]
        return Peak(data["op"], tuple(data["loops"]), tuple(held))


def peak(hlo_proto: bytes) -> Peak:
    """Returns what each allocation of the step in a serialized `HloProto` holds, constants and
    thread-local memory left out.

    Device bytes add up to temp + arguments + outputs - aliased of the step's memory analysis.
    Raises StepError if the bytes are no such message, or lack its module or its buffer assignment.
    """
    try:
        message = read(hlo_proto)  # HloProto: the module is field 1, the assignment field 3
        module, assignment = Module(message.message(1)), _Assignment(message.message(3))
        if not (module.instructions and assignment.allocations):
            raise ValueError("there is no module or no buffer assignment in it")
        return _peak(module, assignment)
    except (ValueError, KeyError, IndexError) as error:
        raise StepError(
            f"explain: XLA's buffer assignment ({len(hlo_proto)} bytes) cannot be read:"
            f" {type(error).__name__}: {error};"
            " expected a serialized HloProto, as xla_dump_hlo_as_proto writes it; this version of"
            " jaxlib may write another"
        ) from error


# Fields of BufferAllocationProto (xla/service/hlo.proto). _LIVE_OUT: the step may return what lies
# there. _ALIASED: it is an argument's memory, into which an output is written.
_INDEX, _SIZE, _THREAD_LOCAL, _IS_ARGUMENT, _LIVE_OUT = 1, 2, 3, 5, 7
_IS_TUPLE, _CONSTANT, _ALIASED = 11, 12, 13


def _peak(module: Module, assignment: "_Assignment") -> Peak:
    """Names every allocation that counts.

    Temporaries of one allocation share its bytes over time. So only those that are alive at its
    fullest moment are listed, and the rest of the allocation is packing.
    """
    held: list[Held] = []
    # The largest temporary allocation of the device: the step's peak is where that one is fullest.
    at, fullest = None, -1
    for a in assignment.allocations:
        size, slices = a.number(_SIZE), assignment.slices[a.number(_INDEX)]
        if a.number(_THREAD_LOCAL) or a.number(_CONSTANT) or not size:
            continue  # temp + arguments + outputs count none of these
        places = [assignment.places[b] for b in slices]
        host = any(module.space(place) == _HOST_SPACE for place in places)
        if a.number(_IS_ARGUMENT):
            # A donated argument's memory later holds an output too: name it after the argument.
            own = [p for p in places if p[0] in module.parameters]
            held.append(_held(module, "argument", size, host, own or places))
        if a.number(_LIVE_OUT) and not a.number(_ALIASED):  # not in a donated argument's memory
            outputs = [i for i, place in enumerate(module.outputs) if place in places]
            if a.number(_IS_TUPLE):
                # Pointers to the outputs, where a step has several.
                held.append(Held("output", size, host, "tuple", op="the table of outputs"))
            else:
                held.append(
                    _held(module, "output", size, host, places[-1:], outputs[0] if outputs else -1)
                )
        if a.number(_IS_ARGUMENT) or a.number(_LIVE_OUT):
            continue
        # What remains are temporaries.
        live, instruction = assignment.fullest(a.number(_INDEX))
        if size > fullest and not host:
            at, fullest = instruction, size
        free = size
        for got, buffers in _disjoint((slices[b], b) for b in live):
            held.append(
                _held(
                    module, "temporary", got, host, [assignment.places[b] for b in sorted(buffers)]
                )
            )
            free -= got
        if free:
            held.append(Held("packing", free, host))
    where = module.by_name.get(at or "")
    if where is None:
        return Peak("", (), tuple(held))
    return Peak(module.instructions[where].op, tuple(module.loops(where)), tuple(held))


def _held(
    module: Module, kind: str, size: int, host: bool, places: list[Place], index: int = -1
) -> Held:
    """Describes the `size` bytes that the values at `places` share.

    The values have their origins together. Shape and dtype are the last one's, and the operation is
    that of the last one for which XLA names any.
    """
    origins = [o for place in places for o in module.origins(place)]
    dtype, shape = module.shape(places[-1])
    ops = [module.instructions[at].op for at, _ in places]
    return Held(
        kind=kind,
        bytes=size,
        host=host,
        dtype=dtype,
        shape=shape,
        op=next((op for op in reversed(ops) if op), ""),
        sources=tuple(dict.fromkeys(o.op for o in origins if o.op)),
        loops=tuple(module.loops(places[-1][0])),
        handed_on=tuple(
            dict.fromkeys(loop for place in places for loop in module.handed_on(place))
        ),
        index=index,
    )


def _disjoint(slices: Iterable[tuple[tuple[int, int], int]]) -> Iterator[tuple[int, list[int]]]:
    """Yields the bytes and the buffers of each slice, without counting a byte twice: of slices that
    overlap, the later one gets what is left.

    slices: (offset, size) of each buffer, and the buffer's id.
    """
    shared: dict[tuple[int, int], list[int]] = {}
    for place, buffer in slices:
        shared.setdefault(place, []).append(buffer)
    end = 0  # bytes below it are counted
    # By offset, and the largest first: what lies inside a larger slice then adds nothing.
    for (offset, size), buffers in sorted(shared.items(), key=lambda s: (s[0][0], -s[0][1])):
        got = offset + size - max(end, offset)
        if got > 0:
            end = offset + size
            yield got, buffers


class _Assignment:
    """A `BufferAssignmentProto`.

    places: where each buffer's value is defined, by the buffer's id.
    allocations: as they were written.
    slices: by an allocation's index, (offset, size) of each of its buffers by the buffer's id.
    """

    def __init__(self, message: Message):
        self.places: dict[int, Place] = {}
        for b in message.messages(1):  # LogicalBufferProto: id is 1, defined_at is 3
            where = b.message(3)  # instruction_id is 4, shape_index is 3
            self.places[b.number(1)] = where.number(4), tuple(where.numbers(3))
        self.allocations = list(message.messages(3))
        # Field 9 is `assigned`: a buffer's id, an offset, a size.
        self.slices = {
            a.number(1): {s.number(1): (s.number(2), s.number(3)) for s in a.messages(9)}
            for a in self.allocations
        }
        # HeapSimulatorTrace: for each event its kind, the buffer's id, and the instruction's name.
        self._traces = [
            [(e.number(1), e.number(2), e.text(4)) for e in trace.messages(1)]
            for trace in message.messages(4)
        ]

    def fullest(self, allocation: int) -> tuple[set[int], str]:
        """Returns the buffers that are alive when `allocation` is fullest, and the name of the
        instruction that runs then.

        Where no trace tells its history, all its buffers count as alive.
        """
        slices = self.slices[allocation]
        best, most, at = set(slices), -1, ""
        for trace in self._traces:
            # The living buffers of each slice. One slice may have several, which share its memory:
            # its bytes count from the first that appears to the last that goes.
            alive: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
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
        return best, at
