"""Draws live bytes as text: a chart of a few lines, with the peak marked."""

import math

from jaxmem._core.bytes import show_bytes
from jaxmem._result.memory.live import Live

ROWS, COLUMNS = 9, 66  # of the chart; with the axis before it, lines have at most 79 characters
_AXIS = 11  # characters of a number next to it
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_STAYS, _SAVED = ("arguments", "outputs"), ("saved", "untagged")
KEY = "░ arguments, outputs   ▒ saved for the backward   █ the rest   ↻ a loop's turn"


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
