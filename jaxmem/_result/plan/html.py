"""Writes a plan as a piece of HTML for notebooks: the table, the step's bytes and times, and where
states are placed the lanes of the step.
"""

from collections.abc import Sequence
from html import escape

from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.timeline import PLACED, Timeline, named, summary
from jaxmem._result.plan.timeline_figure import Panel, colour, panels, places

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
    names = "".join(_cell("th", column, column) for column in head)
    rows = (
        "".join(_cell("td", column, text) for column, text in zip(head, line)) for line in cells
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    lines = "<br>".join(map(escape, below))
    return (
        f"<div><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>{lines}</p>{'' if timeline is None else _lanes(timeline)}</div>"
    )


def _lanes(timeline: Timeline) -> str:
    """The memories of the layers' states, and the lanes of a step."""
    key = "<br>".join(
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{colour(place)}'
        f'"></span> {named(start, count)}, {escape(PLACED[place])}: {show_bytes(here)} on the'
        f" device, {show_bytes(there)} in host memory"
        for place, start, count, here, there in timeline.by_place()
    )
    below = "<br>".join(map(escape, summary(timeline)))
    drawn = "".join(map(_panel, panels(timeline)))
    strip = _row("states of layers", places(timeline), "Where the states of each layer lie")
    return f"{strip}<p>{key}</p>{drawn}<p>{below}</p>"


def _panel(panel: Panel) -> str:
    label = lambda at, text: (
        f'<text x="{at:.2f}%" y="11" font-size="11" text-anchor="middle" fill="currentColor">'
        f"{escape(text)}</text>"
    )
    head = "".join(label(at, name) for at, name in panel.phases)
    ticks = "".join(label(at, text) for at, text in panel.ticks)
    rows = "".join(_row(name, marks) for name, marks in panel.rows)
    inner = _row("", head) + rows + _row("ms", ticks)
    said = escape(panel.said)
    return f'<p>{escape(panel.title)}</p><div role="img" aria-label="{said}">{inner}</div>'


def _row(name: str, marks: str, said: str = "") -> str:
    """A name and the marks beside it."""
    label = f' role="img" aria-label="{escape(said)}"' if said else ' aria-hidden="true"'
    return (
        '<div style="display:grid;grid-template-columns:8em 1fr;align-items:center">'
        f"<span>{escape(name)}</span>"
        f'<svg width="100%" height="15" style="overflow:visible"{label}>{marks}</svg></div>'
    )


def _cell(kind: str, column: str, text: str) -> str:
    side = "right" if column in _NUMBERS else "left"
    return f'<{kind} style="text-align:{side}">{escape(text)}</{kind}>'
