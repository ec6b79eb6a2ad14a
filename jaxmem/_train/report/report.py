"""report(): writes one HTML file about a plan, a run, or several of them side by side."""

import dataclasses
import os
import pathlib
import shlex
from collections.abc import Sequence

from jaxmem._core.files import write_whole
from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.plan.plan import Plan
from jaxmem._train.report.page import page
from jaxmem._train.runs.read import Run, checked, read, results, told_apart


def report(
    plan: Plan,
    path: str | os.PathLike,
    run: str | os.PathLike | None = None,
    explained: Explanation | None = None,
) -> None:
    """Writes an HTML page about a plan, and about a run under the plan.

    The page is one file that needs no other file. The file appears whole or not at all.

    plan: the plan, from `jaxmem.plan` or `Plan.load`.
    path: the file of the page. A missing folder is made.
    run: the folder of a run under the plan. The page then also shows the run's results, from
      metrics.jsonl, summary.json and explained.json, as far as these files exist. None means no
      run.
    explained: the result of `jaxmem.explain(..., plan=plan, beside=True)`. The page then also shows
      the bytes in use over the step's schedule. None means no explanation.

    Raises PlanFileError for a broken file, and names the file and its line or field. Raises OSError
    if the page cannot be written.
    """
    path = pathlib.Path(path)
    plan = checked(plan, path)
    if run is None:
        again = f"jaxmem.plans.report(plan, {str(path)!r})"
        _write(path, page([Run(f"plan for {plan.target}", plan, explained=explained)], again))
    else:
        found = results(run, plan)
        if explained is not None:
            found = dataclasses.replace(found, explained=explained)
        _write(path, page([found], _command([str(run)], path)))


def report_runs(runs: Sequence[str], out: pathlib.Path) -> str:
    """Writes the page about `runs`, folders of results or plans' files, to `out`; returns its path.

    Raises PlanFileError, naming the file and its line or field, where one is broken.
    """
    found = told_apart([read(run) for run in runs], list(runs))
    _write(out, page(found, _command(runs, out)))
    return str(out)


def _command(runs: Sequence[str], out: pathlib.Path) -> str:
    return shlex.join(["jaxmem", "report", *runs, "--out", str(out)])


def _write(path: pathlib.Path, text: str) -> None:
    """Writes the page. A lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question
    mark.
    """
    write_whole(path, text.encode("utf-8", "replace"))
