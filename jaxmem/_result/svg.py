"""Draws figures as inline SVG, and tables and legends as HTML, for pages and notebooks.

Positions are percent, so that a figure stretches and its text keeps its size. y runs upwards here,
and downwards in SVG: hence `100 - y`.
"""

import dataclasses
import html
import math
from collections.abc import Collection, Iterable, Sequence

from jaxmem._core.bytes import show_bytes

Ticks = tuple[tuple[float, str], ...]  # a value, and its label
Points = Iterable[tuple[float, float]]  # in percent


def escape(text: object) -> str:
    """`text` for HTML and SVG, inside an element or a quoted attribute."""
    return html.escape(str(text), quote=True)


def breakable(text: object) -> str:
    """`escape` with line breaks allowed after `_` and `/`."""
    return escape(text).replace("_", "_<wbr>").replace("/", "/<wbr>")


def element(tag: str, content: str = "", **attributes: object) -> str:
    """An element of HTML or SVG.

    content: its content, as HTML.
    attributes: values that are not escaped yet. None leaves an attribute out, `css` is the class,
      and underscores stand for hyphens.
    """
    names = {name: "class" if name == "css" else name.replace("_", "-") for name in attributes}
    text = "".join(
        f' {names[name]}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{text}>{content}</{tag}>"


def percent(value: float) -> str:
    return f"{value:.2f}%"


# -- Axes.


@dataclasses.dataclass(frozen=True)
class Axis:
    """A linear scale from `low` to `high`, which differ, and the `ticks` along it."""

    low: float
    high: float
    ticks: Ticks

    def percent(self, value: float) -> float:
        """The position of `value`, from 0 to 100; beyond an end, the position of the end."""
        return 100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


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
    ticks = ((v * unit, f"{v:,.10g} {name}") for v in nice(low / unit, high / unit))
    return Axis(low, high, tuple(ticks))


def nice(low: float, high: float) -> list[float]:
    """At most five round numbers between two ends, which differ."""
    rough = (high - low) / 4
    # The step is the least of 1, 2, 2.5 and 5 times a power of ten that is not below `rough`; the
    # small terms keep a rounding error from leaving out the ticks at the ends.
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def near_scale(budget: int | None, most: float) -> int | None:
    """A budget, if it is near enough to the greatest number of a figure to be drawn; else None."""
    return budget if budget is not None and budget <= 1.5 * most else None


def padded(values: Iterable[float]) -> tuple[float, float]:
    """The least and the greatest value with a margin, so that no mark touches the frame."""
    values = list(values)
    low, high = min(values), max(values)
    margin = max(0.08 * (high - low), 0.01 * abs(high))
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def _apart(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis, which must differ: equal ends get space above."""
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


# -- Marks.


def chart(x: Axis, y: Axis, marks: Iterable[str], *, name: str, x_title: str, y_title: str) -> str:
    """A plot: a grid with labelled ticks, and marks over it.

    x, y: the axes.
    marks: SVG, drawn on these axes.
    name: the text for screen readers.
    x_title, y_title: the titles of the axes.
    """
    grid = ""
    for value, text in y.ticks:
        at = percent(100 - y.percent(value))
        grid += element("line", css="grid", x1="0", x2="100%", y1=at, y2=at)
        grid += element("text", escape(text), css="tick end", x="-8", y=at, dy=".32em")
    for value, text in x.ticks:
        at = percent(x.percent(value))
        grid += element("text", escape(text), css="tick mid", x=at, y="100%", dy="1.6em")
    base = element("line", css="base", x1="0", x2="100%", y1="100%", y2="100%")
    inner = f"{grid}{base}{''.join(marks)}"
    figure = element("svg", inner, css="chart", role="img", aria_label=name)
    return (
        element("div", escape(y_title), css="axis-title")
        + element("div", figure, css="plot")
        + element("div", escape(x_title), css="axis-title right")
    )


def _title(text: str) -> str:
    """The text that a browser shows for a mark under the pointer."""
    return element("title", escape(text)) if text else ""


def _shape(path: str, css: str, title: str = "", *, height: int = 100, fill: str | None = None):
    """A path that stretches over its box, which is 100 wide and `height` high."""
    inner = element("path", _title(title), css=css, fill=fill, d=path)
    # The size is written for notebooks, which have no style sheet.
    size = {"css": "stretch", "width": "100%", "height": "100%"}
    box = {"viewBox": f"0 0 100 {height}", "preserveAspectRatio": "none"}
    return element("svg", inner, **size, **box)


def line(pieces: Iterable[Points], css: str) -> str:
    """Lines through points; a piece of one point is a dot."""
    paths = ["L".join(f"{x:.2f} {100 - y:.2f}" for x, y in piece) for piece in pieces]
    # a line of no length, whose round ends make the dot
    return _shape("".join(f"M{p}" if "L" in p else f"M{p}h0" for p in paths), f"line {css}")


def band(edges: Iterable[tuple[list, list]], css: str) -> str:
    """Areas between a lower and an upper line through points, a pair for each area."""
    outlines = ([*lower, *upper[::-1]] for lower, upper in edges)
    points = ("L".join(f"{x:.2f} {100 - y:.2f}" for x, y in outline) for outline in outlines)
    return _shape("".join(f"M{p}Z" for p in points), f"band {css}")


def area(heights: Sequence[float], css: str, title: str) -> str:
    """The area under a staircase over the whole width. Steps are equally wide, and `heights` are
    percent.
    """
    path, before = "M0 100", ""
    for i, height in enumerate(heights):
        if (top := f"V{100 - height:.2f}") != before:
            path, before = f"{path}H{100 * i / len(heights):.2f}{top}", top
    return _shape(f"{path}H100V100Z", f"area {css}", title)


def boxes(
    spans: Iterable[tuple[float, float]], css: str, title: str = "", fill: str | None = None
) -> str:
    """Rectangles over the whole height, of (left, width) in percent, as one shape."""
    path = "".join(f"M{left:.3f} 0h{width:.3f}v1h-{width:.3f}z" for left, width in spans if width)
    return _shape(path, css, title, height=1, fill=fill) if path else ""


def separators(count: int) -> str:
    """The gaps between `count` cells of one width."""
    path = "".join(f"M{100 * i / count:.2f} 0V1" for i in range(1, count))
    return _shape(path, "gap", height=1) if path else ""


def across(y: float, css: str, title: str) -> str:
    """A horizontal line over the whole width."""
    at = percent(100 - y)
    return element("line", _title(title), css=css, x1="0", x2="100%", y1=at, y2=at)


def upright(x: float, css: str, title: str = "", **attributes: object) -> str:
    """A vertical line over the whole height."""
    at = {"x1": percent(x), "x2": percent(x), "y1": "0", "y2": "100%"}
    return element("line", _title(title), css=css, **attributes, **at)


def dot(x: float, y: float, css: str, title: str) -> str:
    at = {"cx": percent(x), "cy": percent(100 - y), "r": "5.5"}
    return element("circle", _title(title), css=f"dot {css}", **at)


def box(left: float, width: float, css: str, title: str = "") -> str:
    """A rectangle over the whole height; widths in percent."""
    at = {"x": percent(left), "width": percent(max(0.0, width)), "y": "0", "height": "100%"}
    return element("rect", _title(title), css=css, **at)


# -- Text of figures, and tables.


def key(css: str) -> str:
    """The sign of a mark in a legend."""
    return element("i", css=f"key {css}")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Signs with their meanings; the sign is HTML, the meaning text."""
    items = (element("li", f"{sign}<span>{escape(text)}</span>") for sign, text in entries)
    return element("ul", "".join(items), css="legend")


def fine(sentences: Iterable[str]) -> str:
    """Sentences under a figure, in small print."""
    return "".join(element("p", escape(text), css="fine") for text in sentences)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str) -> str:
    """A table whose cells know their column, so that it can fold where it is narrow. Cells are
    HTML.
    """
    cell = lambda name, text: element(
        "td", text, data_label=name, css=None if text != "–" else "none"
    )
    tops = (element("th", escape(name), scope="col") for name in head)
    return grid(tops, (map(cell, head, cells) for cells in rows), f"wide {css}")


def named_rows(
    head: Sequence[str], rows: Iterable[Sequence[str]], css: str, marked: Collection[int] = ()
) -> str:
    """A table in which the first cell of a row names it. All cells are HTML.

    marked: the columns that are set off from the others.
    """
    look = lambda i: "marked" if i in marked else None
    tops = (element("th", name, scope="col", css=look(i)) for i, name in enumerate(head))
    cell = lambda i, text: (
        element("td", text, css=look(i)) if i else element("th", text, scope="row")
    )
    lines = ((cell(i, text) for i, text in enumerate(cells)) for cells in rows)
    return grid(tops, lines, css)


def grid(head: Iterable[str], rows: Iterable[Iterable[str]], css: str | None = None) -> str:
    """A table of cells that are elements already. An empty head is left out."""
    line = lambda cells: element("tr", "".join(cells))
    tops, body = "".join(head), element("tbody", "".join(map(line, rows)))
    return element("table", (element("thead", line(tops)) if tops else "") + body, css=css)


def show_ms(milliseconds: float) -> str:
    if not math.isfinite(milliseconds):
        return "–"
    size = abs(milliseconds)
    return f"{milliseconds:,.{1 if size >= 100 else 2 if size >= 1 else 3}f} ms"
