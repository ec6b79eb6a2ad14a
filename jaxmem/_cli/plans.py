"""`jaxmem show`, `diff` and `report`: the commands about the files of plans and frontiers, which
import no JAX. Each function runs one command, and returns its exit code.
"""

import argparse
import pathlib
import sys

from jaxmem._cli.output import check_outputs, say, show_result
from jaxmem._core.progress import console
from jaxmem._result.action_styles import LOOKS
from jaxmem._result.frontier import Frontier, load_result
from jaxmem._result.plan.difference import difference
from jaxmem._result.plan.plan import HEAD, Plan, cells, summary
from jaxmem._train.report.report import report_frontier, report_runs
from jaxmem._train.runs.run import EXPLAINED, METRICS, PLAN, SUMMARY
from jaxmem.errors import JaxmemError

_COLOURS = {str(action): look.terminal for action, look in LOOKS.items()}
_NUMBERS = ("before", "after", "ms")
_NARROW = 100  # columns; a narrower table has no kind, and the codec is under the action


def show(args: argparse.Namespace) -> None:
    found = load_result(args.plan)
    table = lambda: print(found) if isinstance(found, Frontier) else show_plan(found)
    show_result(args, found.to_json(), table)


def diff(args: argparse.Namespace) -> None:
    found = difference(Plan.load(args.first), Plan.load(args.second))
    show_result(args, found.to_json(), lambda: say(str(found), hang="  "))


def report(args: argparse.Namespace) -> None:
    first = pathlib.Path(args.runs[0])
    default = (first if first.is_dir() else first.parent) / "report.html"
    out = default if args.out is None else pathlib.Path(args.out)
    read = {}  # files that the page must not overwrite
    for run in args.runs:
        read[run] = f"{run!r}, which is read,"
        for name in (PLAN, METRICS, SUMMARY, EXPLAINED):
            read[str(pathlib.Path(run, name))] = f"{name} of {run!r}, which is read,"
    check_outputs({"--out": str(out)}, read)
    frontier = _frontier(args.runs)
    if frontier is None:
        report_runs(args.runs, out)
    else:
        report_frontier(frontier, out)
    print(out)


def _frontier(runs: list[str]) -> Frontier | None:
    """The frontier to report; None if `runs` are folders and plans' files. Raises JaxmemError for a
    frontier among several runs.
    """
    for run in runs:
        if pathlib.Path(run).is_file() and isinstance(found := load_result(run), Frontier):
            if len(runs) == 1:
                return found
            raise JaxmemError(
                f"report: {run!r} is the file of a frontier, and {len(runs)} runs were given;"
                " expected a frontier alone, or folders and plans' files"
            )
    return None


def show_plan(plan: Plan) -> None:
    """Prints a plan. On a terminal, if rich is installed, it is in colour, and "why" is wrapped to
    the width that the other columns leave. On a narrow terminal, a codec is printed under its
    action.
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
