"""Draws the marks of a figure as inline SVG that is as wide as its place.

Positions are percent, so that a figure stretches and its text keeps its size. y runs upwards here,
and downwards in SVG: hence `100 - y`.
"""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.ticks import nice

Ticks = tuple[tuple[float, str], ...]  # value, and what is written at it


@dataclasses.dataclass(frozen=True)
class Axis:
    """A linear scale from `low` to `high`, which differ, and the `ticks` along it."""

    low: float
    high: float
    ticks: Ticks

    def percent(self, value: float) -> float:
        """Where `value` lies, from 0 to 100; beyond the ends, at the end."""
        return 100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def escape(text: object) -> str:
    """`text` for HTML and SVG, inside an element or a quoted attribute."""
    return html.escape(str(text), quote=True)


def breakable(text: object) -> str:
    """`escape`, with leave to break the line after `_` and `/`."""
    return escape(text).replace("_", "_<wbr>").replace("/", "/<wbr>")


def axis(low: float, high: float) -> Axis:
    """An axis of plain numbers."""
    low, high = _apart(low, high)
    return Axis(low, high, tuple((v, f"{v:,.10g}") for v in nice(low, high)))


def bytes_axis(low: float, high: float) -> Axis:
    """An axis of bytes, its ticks at round numbers of the unit that suits `high`."""
    low, high = _apart(low, high)
    unit = 1  # bytes, or KiB, MiB or GiB
    while abs(high) / unit >= 1024 and unit < 2**30:
        unit *= 1024
    name = show_bytes(unit).split()[1]
    return Axis(
        low, high, tuple((v * unit, f"{v:,.10g} {name}") for v in nice(low / unit, high / unit))
    )


def padded(values: Iterable[float]) -> tuple[float, float]:
    """The least and the greatest value with a margin, so that no mark lies on the frame."""
    values = list(values)
    low, high = min(values), max(values)
    margin = max(0.08 * (high - low), 0.01 * abs(high))
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def chart(x: Axis, y: Axis, marks: str, *, name: str, x_title: str, y_title: str) -> str:
    """A plot: a grid with labelled ticks, and marks over it.

    x, y: the axes.
    marks: SVG, drawn on these axes.
    name: what a screen reader says.
    x_title, y_title: what stands beside the axes.
    """
    grid = [f'<line class="grid" x1="0" x2="100%" y1="{100 - y.percent(v):.2f}%"'
            f' y2="{100 - y.percent(v):.2f}%"/>'
            f'<text class="tick end" x="-8" y="{100 - y.percent(v):.2f}%"'
            f' dy=".32em">{escape(t)}</text>'
            for v, t in y.ticks]  # fmt: skip
    grid += [
        f'<text class="tick mid" x="{x.percent(v):.2f}%" y="100%" dy="1.6em">{escape(t)}</text>'
        for v, t in x.ticks
    ]
    return (
        f'<div class="axis-title">{escape(y_title)}</div><div class="plot">'
        f'<svg class="chart" role="img" aria-label="{escape(name)}">{"".join(grid)}'
        f'<line class="base" x1="0" x2="100%" y1="100%" y2="100%"/>{marks}</svg></div>'
        f'<div class="axis-title right">{escape(x_title)}</div>'
    )


def line(pieces: Iterable[Iterable[tuple[float, float]]], css: str) -> str:
    """Lines through points in percent, y upwards; a piece of one point is a dot."""
    paths = ["L".join(f"{x:.2f} {100 - y:.2f}" for x, y in piece) for piece in pieces]
    # a line of no length, whose round ends make the dot
    path = "".join(f"M{p}" if "L" in p else f"M{p}h0" for p in paths)
    return (
        '<svg class="stretch" viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<path class="line {css}" d="{path}"/></svg>'
    )


def band(
    edges: Iterable[tuple[list[tuple[float, float]], list[tuple[float, float]]]], css: str
) -> str:
    """Areas between a lower and an upper line through points in percent, a pair for each area."""
    outlines = [lower + upper[::-1] for lower, upper in edges]
    path = "".join(
        "M" + "L".join(f"{x:.2f} {100 - y:.2f}" for x, y in outline) + "Z" for outline in outlines
    )
    return (
        '<svg class="stretch" viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<path class="band {css}" d="{path}"/></svg>'
    )


def area(heights: Sequence[float], css: str, title: str) -> str:
    """What lies below a staircase over the whole width, whose steps are equally wide and as high as
    `heights` say, in percent.
    """
    path, before = "M0 100", ""
    for i, height in enumerate(heights):
        if (top := f"V{100 - height:.2f}") != before:
            path, before = f"{path}H{100 * i / len(heights):.2f}{top}", top
    return (
        '<svg class="stretch" viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<path class="area {css}" d="{path}H100V100Z"><title>{escape(title)}</title></path></svg>'
    )


def across(y: float, css: str, title: str) -> str:
    """A horizontal line over the whole width."""
    return (
        f'<line class="{css}" x1="0" x2="100%" y1="{100 - y:.2f}%" y2="{100 - y:.2f}%">'
        f"<title>{escape(title)}</title></line>"
    )


def dot(x: float, y: float, css: str, title: str) -> str:
    return (
        f'<circle class="dot {css}" cx="{x:.2f}%" cy="{100 - y:.2f}%"'
        f' r="5.5"><title>{escape(title)}</title></circle>'
    )


def upright(x: float, css: str, title: str) -> str:
    """A vertical line over the whole height."""
    said = f"<title>{escape(title)}</title>" if title else ""
    return f'<line class="{css}" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="100%">{said}</line>'


def box(left: float, width: float, css: str, title: str = "") -> str:
    """A rectangle over the whole height; widths in percent."""
    return (
        f'<rect class="{css}" x="{left:.2f}%" width="{max(0.0, width):.2f}%" y="0" height="100%">'
        + (f"<title>{escape(title)}</title>" if title else "")
        + "</rect>"
    )


def separators(count: int) -> str:
    """The gaps between `count` cells of one width."""
    path = "".join(f"M{100 * i / count:.2f} 0V1" for i in range(1, count))
    return (
        '<svg class="stretch" viewBox="0 0 100 1" preserveAspectRatio="none"><path class="gap"'
        f' d="{path}"/></svg>'
        if path
        else ""
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Marks with their meanings; the mark is HTML, the meaning text."""
    items = "".join(f"<li>{mark}<span>{escape(text)}</span></li>" for mark, text in entries)
    return f'<ul class="legend">{items}</ul>'


def show_ms(milliseconds: float) -> str:
    if not math.isfinite(milliseconds):
        return "–"
    return (
        f"{milliseconds:,.{1 if abs(milliseconds) >= 100 else 2 if abs(milliseconds) >= 1 else 3}f}"
        " ms"
    )


def _apart(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis, which must differ: where all values are equal, room is made above."""
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))
