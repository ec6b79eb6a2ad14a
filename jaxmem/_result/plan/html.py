"""Writes a plan as a piece of HTML for notebooks: the table, the step's bytes and times, and where
states are placed the lanes of the step.
"""

from collections.abc import Iterable, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.timeline import PLACED, Timeline, named, summary
from jaxmem._result.plan.timeline_figure import Panel, colour, panels, places
from jaxmem._result.svg import element, escape, grid

_NUMBERS = ("before", "after", "ms")  # set flush right


def html(
    head: Sequence[str],
    cells: Sequence[Sequence[str]],
    below: Sequence[str],
    timeline: Timeline | None,
) -> str:
    """A plan as one element, without scripts or style sheets: the notebook's own look applies.

    head, cells: the names of the table's columns, and its rows.
    below: the lines of text under the table.
    timeline: the lanes of the step, or None.
    """
    cell = lambda kind, column, text: element(
        kind, escape(text), style=f"text-align:{'right' if column in _NUMBERS else 'left'}"
    )
    names = (cell("th", column, column) for column in head)
    rows = ((cell("td", column, text) for column, text in zip(head, line)) for line in cells)
    lanes = "" if timeline is None else _lanes(timeline)
    return element("div", grid(names, rows) + _lines(below) + lanes)


def _lines(texts: Iterable[str]) -> str:
    """A paragraph with a line for each text."""
    return element("p", "<br>".join(map(escape, texts)))


def _lanes(timeline: Timeline) -> str:
    """The memories of the layers' states, and the lanes of a step."""
    key = "<br>".join(
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{colour(place)}'
        f'"></span> {named(start, count)}, {escape(PLACED[place])}: {show_bytes(here)} on the'
        f" device, {show_bytes(there)} in host memory"
        for place, start, count, here, there in timeline.by_place()
    )
    drawn = "".join(map(_panel, panels(timeline)))
    strip = _row("states of layers", places(timeline), "Where the states of each layer lie")
    return f"{strip}<p>{key}</p>{drawn}{_lines(summary(timeline))}"


def _panel(panel: Panel) -> str:
    """The lanes of one pass, as rows of a figure."""
    rows = (("", panel.head), *panel.rows, ("ms", panel.ticks))
    inner = "".join(_row(name, marks) for name, marks in rows)
    drawn = element("div", inner, role="img", aria_label=panel.said)
    return f"<p>{escape(panel.title)}</p>{drawn}"


def _row(name: str, marks: str, said: str | None = None) -> str:
    """A row of a figure: a name and marks."""
    role = {"aria_hidden": "true"} if said is None else {"role": "img", "aria_label": said}
    size = {"width": "100%", "height": "15", "style": "overflow:visible"}
    style = "display:grid;grid-template-columns:8em 1fr;align-items:center"
    inner = element("span", escape(name)) + element("svg", marks, **size, **role)
    return element("div", inner, style=style)
