"""Prints a plan as a table that fits the terminal, in colour, if standard output is a terminal and
rich is installed; as plain text elsewhere.
"""

import sys

from jaxmem._core.progress import console
from jaxmem._result.action_styles import LOOKS
from jaxmem._result.plan.plan import HEAD, Plan, cells, summary

_COLOURS = {str(action): look.terminal for action, look in LOOKS.items()}
_NUMBERS = ("before", "after", "ms")
_NARROW = 100  # columns; a narrower table has no kind, and the codec is under the action


def show_plan(plan: Plan) -> None:
    """Prints a plan. On a terminal, "why" is wrapped to the width that the other columns leave. On
    a narrow terminal, a codec is printed under its action.
    """
    terminal = console(sys.stdout)
    if terminal is None:
        print(plan, flush=True)
        return
    from rich.table import Table
    from rich.text import Text

    left_out = {"codec", "kind"} if terminal.width < _NARROW else set()
    columns = [column for column in HEAD if column not in left_out]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        number = column in _NUMBERS
        side = "right" if number else "left"
        table.add_column(column, justify=side, no_wrap=number, overflow="fold")
    for line in cells(plan):
        cell = {column: Text(text) for column, text in zip(HEAD, line)}
        cell["action"].stylize(_COLOURS.get(cell["action"].plain, ""))
        if "codec" in left_out and cell["codec"].plain != "-":
            cell["action"].append(f"\n{cell['codec'].plain}", style="dim")
        table.add_row(*(cell[column] for column in columns))
    terminal.print(table)
    for text in summary(plan):
        terminal.print(Text(text))
