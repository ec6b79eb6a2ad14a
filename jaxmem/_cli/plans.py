"""`jaxmem show`, `diff` and `report`: the commands about plans' files, which import no JAX. Each
function runs one command, and returns its exit code.
"""

import argparse
import pathlib

from jaxmem._cli.output import check_outputs, say, show_result
from jaxmem._cli.tables import show_plan
from jaxmem._result.plan.difference import difference
from jaxmem._result.plan.plan import Plan
from jaxmem._train.report.report import report_runs
from jaxmem._train.runs.run import EXPLAINED, METRICS, PLAN, SUMMARY


def show(args: argparse.Namespace) -> int:
    found = Plan.load(args.plan)
    show_result(args, found.to_json(), lambda: show_plan(found))
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
    print(report_runs(args.runs, out))
    return 0
