"""The report: one HTML page, whole in one file, about a plan, a run, or several of them side by
side.
"""

import os
import pathlib
import shlex
from collections.abc import Sequence

from jaxmem._core.files import write_whole
from jaxmem._plan.plan import Plan
from jaxmem._report.page import page
from jaxmem._runs.read import Run, checked, read_run, results, told_apart


def report(runs: Sequence[str], out: pathlib.Path) -> str:
    """Writes the page about `runs`, folders of results or plans' files, to `out`, and returns its
    path.

    Raises PlanFileError, naming the file and its line or field, where one is broken.
    """
    read = told_apart([read_run(run) for run in runs], list(runs))
    _write(out, page(read, shlex.join(["jaxmem", "report", *runs, "--out", str(out)])))
    return str(out)


def report_plan(plan: Plan, path: str | os.PathLike, run: str | os.PathLike | None) -> None:
    """`Plan.report`: a plan in memory, and the results of the folder `run` where one is given."""
    path = pathlib.Path(path)
    plan = checked(plan, path)
    if run is None:
        _write(path, page([Run(f"plan for {plan.target}", plan)], f"plan.report({str(path)!r})"))
    else:
        again = shlex.join(["jaxmem", "report", str(run), "--out", str(path)])
        _write(path, page([results(run, plan)], again))


def _write(path: pathlib.Path, text: str) -> None:
    """A lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    write_whole(path, text.encode("utf-8", "replace"))
