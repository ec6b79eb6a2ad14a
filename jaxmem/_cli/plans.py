"""`jaxmem show`, `diff` and `report`: the commands about the files of plans and frontiers, which
import no JAX. Each function runs one command, and returns its exit code.
"""

import argparse
import pathlib

from jaxmem._cli.output import check_outputs, say, show_result
from jaxmem._cli.tables import show_plan
from jaxmem._result.frontier import Frontier, load_result
from jaxmem._result.plan.difference import difference
from jaxmem._result.plan.plan import Plan
from jaxmem._train.report.report import report_frontier, report_runs
from jaxmem._train.runs.run import EXPLAINED, METRICS, PLAN, SUMMARY
from jaxmem.errors import JaxmemError


def show(args: argparse.Namespace) -> int:
    found = load_result(args.plan)
    table = print if isinstance(found, Frontier) else show_plan
    show_result(args, found.to_json(), lambda: table(found))
    return 0


def diff(args: argparse.Namespace) -> int:
    found = difference(Plan.load(args.first), Plan.load(args.second))
    show_result(args, found.to_json(), lambda: say(str(found), hang="  "))
    return 0


def report(args: argparse.Namespace) -> int:
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
    return 0


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
