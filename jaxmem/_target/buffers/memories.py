"""Sums up a buffer assignment by memory: what a program takes of the device's, of the host's."""

import dataclasses

from jaxmem._target.buffers.assignment import BufferAssignment
from jaxmem._target.buffers.proto import Message, read
from jaxmem.errors import StepError

# Fields of BufferAllocationProto (xla/service/hlo.proto). THREAD_LOCAL: it is on no heap. LIVE_OUT:
# the step may return what lies there. COLOR: which memory it is in.
INDEX, SIZE, THREAD_LOCAL, IS_ARGUMENT, LIVE_OUT, COLOR = 1, 2, 3, 5, 7, 8
DEVICE, HOST = 0, 5  # colours; a TPU's others are memories of its cores


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a program takes of one memory, in bytes.

    arguments: of its arguments.
    outputs: of its results, those in the arguments' memory included.
    aliased: of results that lie in the memory of arguments.
    rest: of temporaries and constants.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    rest: int = 0

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.rest


def memories(hlo_proto: bytes) -> tuple[Memory, Memory]:
    """Returns what a program takes of the device's memory and of the host's, by the buffer
    assignment in a serialized `HloProto` of a TPU's.

    Raises StepError if there is none in it.
    """
    try:
        assignment = BufferAssignment(read(hlo_proto).message(3))
        if not assignment.allocations:
            raise ValueError("there is no buffer assignment in it")
        return _of(assignment, DEVICE), _of(assignment, HOST)
    except (ValueError, KeyError, IndexError) as error:
        raise StepError(
            f"the TPU compiler's buffer assignment ({len(hlo_proto)} bytes) cannot be read:"
            f" {type(error).__name__}: {error}; expected a serialized HloProto: this version of"
            " libtpu may write another, the one that jax asks for is known to work"
        ) from error


def on_core(allocation: Message) -> bool:
    """Whether a TPU's allocation is in memory of its cores, which no budget is about."""
    return allocation.number(COLOR) not in (DEVICE, HOST)


def _of(assignment: BufferAssignment, color: int) -> Memory:
    sizes = dict.fromkeys(("arguments", "outputs", "aliased", "rest"), 0)
    for a in assignment.allocations:
        if a.number(COLOR) != color or a.number(THREAD_LOCAL):
            continue
        size, given, returned = a.number(SIZE), a.number(IS_ARGUMENT), a.number(LIVE_OUT)
        sizes["arguments"] += size if given else 0
        sizes["outputs"] += size if returned else 0
        sizes["aliased"] += size if given and returned else 0
        sizes["rest"] += 0 if given or returned else size
    return Memory(**sizes)
