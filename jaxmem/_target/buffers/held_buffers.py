"""What a compiled step holds in memory, as data: at its peak, and over its schedule."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem._core.reader import Reader

POINTS = 300  # of a schedule at most: as many as a figure shows


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of one device that one buffer holds when its allocation is fullest.

    kind: "argument", "output" (apart from the arguments' own memory), "temporary", or "packing":
      the bytes of a temporary allocation that no buffer uses at the peak.
    bytes: bytes that no other `Held` counts.
    host: whether the bytes are in host memory.
    dtype: as XLA writes it, such as "bf16"; "" for packing.
    shape: the dimensions of the array.
    op: the JAX operation that made the buffer, by XLA's metadata; for an argument its name.
    sources: the JAX operations that compute the buffer's values; for a loop's stack, the operations
      that compute the stacked values.
    loops: XLA's names of the loops round the instruction that makes it, innermost first.
    handed_on: the loops that carry the buffer from one iteration to the next, or to a later loop.
    index: an output's position among the step's outputs, else None.
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
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Life:
    """When some bytes of a temporary allocation are in use.

    held: the buffer, equal to an item of `Peak.held` if the buffer is alive at the peak.
    first, last: the first and the last of `Peak.points` at which the buffer is alive.
    handed_on: the loops that carry the buffer at any time; `held` has the loops at the peak alone.
    """

    held: Held
    first: int
    last: int
    handed_on: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Peak:
    """What every allocation of a compiled step holds, temporaries at their peak. Also the device's
    temporaries over the schedule, in which a loop's body stands once.

    op: the JAX operation at which the largest temporary allocation is fullest, "" if unknown.
    loops: XLA's names of the loops round that operation, innermost first.
    held: all buffers and the packing; their device bytes add up to the step's device bytes.
    moments: how many instructions put something into memory. A schedule of more than `POINTS` of
      them is divided into as many ranges, and has the fullest moment of each as a point.
    points: for each point the JAX operation, "" where XLA names none, and XLA's names of the loops
      round it, innermost first.
    lives: the buffers that are alive at one point at least.
    """

    op: str
    loops: tuple[str, ...]
    held: tuple[Held, ...]
    moments: int = 0
    points: tuple[tuple[str, tuple[str, ...]], ...] = ()
    lives: tuple[Life, ...] = ()

    @staticmethod
    def of(data: Mapping[str, Any]) -> "Peak":
        """Rebuilds a `Peak` from the JSON of its `dataclasses.asdict`, where tuples are lists."""
        return _READER.read(Peak, data)


_READER = Reader()
