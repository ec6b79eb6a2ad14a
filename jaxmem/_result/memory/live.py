"""Live bytes: the bytes in device memory over a compiled step's schedule. A chart of a few lines
draws them as text, with the peak marked.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Annotated

from jaxmem._core.bytes import show_bytes
from jaxmem._core.reader import one_of

# Kinds of parts, from the bottom of a figure to the top: parts that exist during the whole step,
# then parts that are saved for the backward, then temporary parts.
KINDS = (
    *("arguments", "outputs", "saved", "untagged"),
    *("gradients", "layer", "outside", "other"),
)
PHASES = ("forward", "backward", "outside the gradient")
ROWS, COLUMNS = 9, 66  # of the chart; with the axis before it, lines have at most 79 characters
_AXIS = 11  # characters of a number next to it
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_STAYS, _SAVED = ("arguments", "outputs"), ("saved", "untagged")
KEY = "░ arguments, outputs   ▒ saved for the backward   █ the rest   ↻ a loop's turn"


@dataclasses.dataclass(frozen=True)
class Series:
    """The bytes of one part over the points of a schedule.

    kind, name: the kind and the name of the part, as in `Part`.
    bytes: bytes at each point.
    """

    kind: Annotated[str, one_of(KINDS)]
    name: str
    bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A range of points of a schedule.

    name: the name, one of `PHASES`.
    loop: whether the points are one iteration of a loop.
    first, last: the first and the last point, both included.
    """

    name: Annotated[str, one_of(PHASES)]
    loop: bool
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Live:
    """The bytes in use in device memory over a compiled step's schedule.

    A loop's body appears once, because every iteration holds the same bytes. A point is an
    instruction that allocates memory. In a schedule of many instructions, a point is the
    instruction with the most bytes of a range, so that the peak is always a point.

    instructions: number of instructions that the points represent.
    total_bytes: bytes of the step: temporaries + arguments + outputs − aliased outputs. Bytes that
      no part holds at a point are free there. At the peak, the free bytes are packing: gaps between
      buffers that a smaller memory would have too.
    parts: the series, by kind in the order of `KINDS`, the largest of each kind first.
    phases: the phases in order, which cover all points.
    """

    instructions: int
    total_bytes: int
    parts: tuple[Series, ...]
    phases: tuple[Phase, ...]

    @property
    def points(self) -> int:
        """Number of points."""
        return self.phases[-1].last + 1 if self.phases else 0

    @property
    def totals(self) -> list[int]:
        """Bytes in use at each point."""
        return [sum(column) for column in zip(*(part.bytes for part in self.parts))]

    @property
    def peak(self) -> int:
        """The first point with the most bytes in use."""
        totals = self.totals
        return totals.index(max(totals))

    def of_kinds(self, *kinds: str) -> list[int]:
        """Returns the bytes of the parts of these kinds at each point."""
        parts = (part.bytes for part in self.parts if part.kind in kinds)
        return [sum(column) for column in zip(*parts)] or [0] * self.points

    def coarser(self, count: int) -> list[int]:
        """Returns the fullest point of each of `count` equal ranges, in order.

        If the schedule has fewer points than `count`, the result has all points.
        """
        totals, count = self.totals, min(count, self.points)
        ends = [self.points * i // count for i in range(count + 1)]
        return [max(range(a, b), key=totals.__getitem__) for a, b in itertools.pairwise(ends)]


def phases(ops: Sequence[str], loops: Sequence[tuple[str, ...]]) -> tuple[Phase, ...]:
    """Divides points into phases.

    ops: the JAX operation of each point, "" if XLA names none. JAX writes its transformations into
      the names: "jvp(" is in a differentiated forward, "transpose(" in a backward.
    loops: the names of the loops that contain each point.
    """
    words = [_phase(op) for op in ops]
    begins = words.index("forward") if "forward" in words else 0
    # Zeros for gradients may be made at once: no backward comes before the forward.
    words[:begins] = ["" if word == "backward" else word for word in words[:begins]]
    reach = max(2, len(ops) // 30)
    found: list[Phase] = []
    start = 0
    for key, run in itertools.groupby(loops):
        end = start + len(list(run))
        for at in range(start, end):
            # XLA moves single instructions far from their phase: what most neighbours say counts.
            near = [w for w in words[max(start, at - reach) : min(end, at + reach + 1)] if w]
            last = found[-1].name if found else "forward"
            name = max(dict.fromkeys(near), key=near.count) if near else last
            found.append(Phase(name, bool(key), at, at))
        start = end
    return _joined(found, shortest=len(ops) // 50)


def _phase(op: str) -> str:
    """The name of the phase of an operation, "" if the operation's name has no phase."""
    if "transpose(" in op:
        return "backward"
    if "jvp(" in op:
        return "forward"
    # A name without a primitive, such as "jit(step)", names a copy or a loop's state.
    primitive = op.rpartition("/")[2]
    named = "/" in op and not primitive.endswith(")") and primitive != "call_exported"
    return "outside the gradient" if named else ""


def _joined(single: list[Phase], shortest: int) -> tuple[Phase, ...]:
    """Equal neighbours as one, and runs of `shortest` points or fewer as a part of the run before
    them.
    """
    runs: list[Phase] = []
    for _, group in itertools.groupby(single, lambda phase: (phase.name, phase.loop)):
        run = list(group)
        runs.append(dataclasses.replace(run[0], last=run[-1].last))
    found: list[Phase] = []
    for run in runs:
        short = run.last - run.first < shortest
        if found and (short or (found[-1].name, found[-1].loop) == (run.name, run.loop)):
            found[-1] = dataclasses.replace(found[-1], last=run.last)
        else:
            found.append(run)
    return tuple(found)


def chart(live: Live, top: int) -> list[str]:
    """The lines of a chart.

    top: the bytes at the upper edge, so that charts can be compared.
    """
    points = live.coarser(COLUMNS)
    wide = COLUMNS / len(points)  # 1, or more where there are fewer points than columns
    totals, stays, saved = live.totals, live.of_kinds(*_STAYS), live.of_kinds(*_SAVED)
    columns = [_column(totals[at], stays[at], stays[at] + saved[at], top) for at in points]
    cells = [columns[int(i / wide)] for i in range(COLUMNS)]
    fullest = math.ceil(points.index(live.peak) * wide)
    said = f"▼ {show_bytes(totals[live.peak])}"
    # The text is on the side of the mark that has enough columns.
    if fullest + len(said) > len(cells):
        said = f"{said[2:]} ▼".rjust(fullest + 1)
    else:
        said = " " * fullest + said
    lines = [f"{'':{_AXIS}}  {said}"]
    for row in reversed(range(ROWS)):
        value = {ROWS - 1: show_bytes(top), ROWS // 2: show_bytes(top // 2)}.get(row, "")
        drawn = "".join(column[row] for column in cells).rstrip()
        lines.append(f"{value:>{_AXIS}} {'┤' if value else '│'}{drawn}".rstrip())
    lines.append(f"{'0 B':>{_AXIS}} └{'─' * len(cells)}")
    return [*lines, f"{'':{_AXIS}}  {_words(live, points, wide)}".rstrip()]


def _column(total: int, stays: int, saved: int, top: int) -> str:
    """A column, from the bottom to the top. A whole cell shows the kind of bytes at its middle. The
    cell above the whole cells shows the rest of the height, in eighths.
    """
    eighths = min(8 * ROWS, -(-8 * ROWS * total // max(1, top)))  # rounded up
    height = lambda size: ROWS * size / max(1, top)
    cells = []
    for row in range(ROWS):
        if 8 * (row + 1) > eighths:
            cells.append(_EIGHTHS[max(0, eighths - 8 * row)])
        elif row + 0.5 < height(stays):
            cells.append("░")
        else:
            cells.append("▒" if row + 0.5 < height(saved) else "█")
    return "".join(cells)


def _words(live: Live, points: list[int], wide: float) -> str:
    """The names of the phases under their columns. A name that is too long is left out."""
    line = ""
    for phase in live.phases:
        columns = [i for i, at in enumerate(points) if phase.first <= at <= phase.last]
        if not columns:
            continue
        name = f"{'↻ ' if phase.loop else ''}{phase.name}"
        start, room = math.ceil(columns[0] * wide), int(len(columns) * wide)
        if len(name) < room and len(line) <= start:
            line = f"{line:<{start}}|{name}" if start else name
    return line
