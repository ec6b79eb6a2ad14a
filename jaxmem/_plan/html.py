"""Writes a plan as a piece of HTML for notebooks: the table, and the step's bytes and times."""

from html import escape
from typing import TYPE_CHECKING

from jaxmem._plan.text import HEAD, cells, summary

if TYPE_CHECKING:
    from jaxmem._plan.plan import Plan

_NUMBERS = ("before", "after", "ms")  # set flush right


def html(plan: "Plan") -> str:
    """The plan as one element, without scripts or style sheets: the notebook's own look applies."""
    head = "".join(_cell("th", column, column) for column in HEAD)
    rows = (
        "".join(_cell("td", column, text) for column, text in zip(HEAD, line))
        for line in cells(plan)
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    below = "<br>".join(map(escape, summary(plan)))
    return (
        f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>{below}</p></div>"
    )


def _cell(kind: str, column: str, text: str) -> str:
    side = "right" if column in _NUMBERS else "left"
    return f'<{kind} style="text-align:{side}">{escape(text)}</{kind}>'
