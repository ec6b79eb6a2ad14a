"""Reads the files in a run's folder: plan, metrics, summary and others.

An error names the file, and the line or the field that is broken.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from jaxmem._core.files import parse_json, read_json
from jaxmem._core.reader import INT_LIMIT, Broken, Reader, Valid, is_size, named
from jaxmem._result.memory.explanation import Explanation, load
from jaxmem._result.plan.plan import Plan
from jaxmem._train.rectifier.counts import Outliers
from jaxmem.errors import PlanFileError

PLAN, METRICS, SUMMARY = "plan.json", "metrics.jsonl", "summary.json"
EXPLAINED, SAMPLE = "explained.json", "sample.txt"
DECISIONS, OUTLIERS = "decisions.jsonl", "outliers.jsonl"
T = TypeVar("T")
_LARGEST = 1e100  # a greater number is treated as one that is not finite


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of a run.

    name: the summary's `config`, or else the name of the folder.
    plan: the plan of the run. None if the run had no plan.
    losses: (step, loss) of each row, in the order of the file. The loss is nan if a row has no
      loss.
    summary: the content of summary.json, which `Record.summary` wrote.
    explained: the explanation of the run's step. None if there is none.
    paces: (step, seconds) of the rows with measured `step_seconds`.
    outliers: the counts of a rectifier, in the order of the steps.
    decisions: the rows of a rectifier's decisions.
    """

    name: str
    plan: Plan | None
    losses: tuple[tuple[float, float], ...] = ()
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)
    explained: Explanation | None = None
    paces: tuple[tuple[float, float], ...] = ()
    outliers: tuple[Outliers, ...] = ()
    decisions: tuple[dict[str, Any], ...] = ()

    def number(self, key: str) -> float | None:
        """Returns a number of the summary. None if the number is missing or is not finite."""
        value = self.summary.get(key)
        return value if value is not None and abs(value) < _LARGEST else None


def read(source: str | os.PathLike) -> Run:
    """Reads the results of a run from its folder, or a plan from its file.

    source: the folder of a run, or the file of a plan.

    Raises PlanFileError if there are no results, or if a file is broken; the message names the line
    or the field.
    """
    source = os.fspath(source)
    path = pathlib.Path(source)
    if not path.is_dir():
        return Run(path.stem, checked(Plan.load(path), path))
    found = [name for name in (PLAN, METRICS, SUMMARY) if (path / name).exists()]
    if not found:
        raise PlanFileError(
            f"report: {source!r} holds none of {PLAN}, {METRICS}, {SUMMARY}; expected a folder that"
            " experiments.train or experiments.plan wrote, or a plan's JSON file"
        )
    plan = checked(Plan.load(path / PLAN), path / PLAN) if PLAN in found else None
    return results(path, plan)


def results(folder: str | os.PathLike, plan: Plan | None) -> Run:
    """Reads the files of a folder other than its plan, and returns them with the plan as a run.
    Every file may be missing.
    """
    folder = pathlib.Path(folder)
    summary = _summary(folder / SUMMARY)
    rows = [row for row, _ in _rows(folder / METRICS, _StepRow)]
    explained = load(folder / EXPLAINED) if (folder / EXPLAINED).exists() else None
    finite = lambda loss: loss if loss is not None and abs(loss) < _LARGEST else math.nan
    timed = ((row.step, row.step_seconds) for row in rows)
    return Run(
        name=str(summary.get("config") or folder.absolute().name),
        plan=plan,
        losses=tuple((float(row.step), float(finite(row.loss))) for row in rows),
        summary=summary,
        explained=explained,
        paces=tuple((float(n), float(s)) for n, s in timed if s is not None and s < _LARGEST),
        outliers=tuple(one for one, _ in _rows(folder / OUTLIERS, Outliers)),
        decisions=tuple(row for _, row in _rows(folder / DECISIONS, _DecisionRow)),
    )


def told_apart(runs: list[Run], sources: list[str]) -> list[Run]:
    """Gives the runs different names. Equal names are replaced by the paths in `sources`, and equal
    paths get a number.
    """
    names = [run.name for run in runs]
    names = [source if names.count(name) > 1 else name for name, source in zip(names, sources)]
    names = [f"{n} ({i + 1})" if names.count(n) > 1 else n for i, n in enumerate(names)]
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names)]


Course = tuple[tuple[float, float], ...]  # (step, number)


# Within the range of a float; a bool is no number.
_is_number = lambda v: isinstance(v, float) or (type(v) is int and abs(v) < INT_LIMIT)
_Number = Annotated[float, Valid("a number", _is_number, instead=True)]
_Step = Annotated[_Number, Valid("a number", lambda step: abs(step) < _LARGEST)]
_Seconds = Annotated[_Number, Valid("a number of at least 0", lambda seconds: not seconds < 0)]


@dataclasses.dataclass(frozen=True)
class _StepRow:
    """The numbers of a row of metrics.jsonl that the page shows. A row may hold others."""

    step: _Step
    loss: _Number | None = None
    step_seconds: _Seconds | None = None


@dataclasses.dataclass(frozen=True)
class _DecisionRow:
    """The fields that every row of a rectifier's decisions has."""

    step: int
    taken: bool
    why: str


@dataclasses.dataclass(frozen=True)
class _Summary:
    """The fields of a summary that the page shows. The other fields may hold anything."""

    first_loss: _Number | None = None
    final_loss: _Number | None = None
    val_loss: _Number | None = None
    tokens_per_second: _Number | None = None
    steps: _Number | None = None
    compiled_bytes: _Number | None = None
    baseline_bytes: _Number | None = None
    peak_bytes: _Number | None = None
    config: str | None = None
    command: str | None = None
    policy: str | None = None
    target: str | None = None
    jax_version: str | None = None


_READER = Reader()
_SIZES = ("budget_bytes", "predicted_bytes", "compiled_bytes", "baseline_bytes", "host_bytes")
_WROTE, _MEND = "JSON that a run wrote", "mend or remove it"


def _rows(path: pathlib.Path, kind: type[T]) -> Iterator[tuple[T, dict[str, Any]]]:
    """The rows of a file, which may be missing: the fields that are read, and the whole row."""
    if not path.exists():
        return
    with named("report:", path, _WROTE, _MEND):
        text = path.read_text(encoding="utf-8")
    # not `splitlines`, which also breaks at separators that a JSON text may hold
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with named("report:", path, _WROTE, _MEND, number):
                data = parse_json(line)
                row = _READER.read(kind, data)
            yield row, data


def _summary(path: pathlib.Path) -> dict[str, Any]:
    """The summary, which may be missing. Its fields are checked where the page shows them."""
    if not path.exists():
        return {}
    with named("report:", path, _WROTE, _MEND):
        data = read_json(path)
        _READER.read(_Summary, data)
    return data


def checked(plan: Plan, path: pathlib.Path) -> Plan:
    """Returns the plan if its numbers can be drawn. Raises PlanFileError, which names `path`, if
    not.
    """
    with named("report:", path, _WROTE, _MEND):
        for name in _SIZES:
            if not is_size(size := getattr(plan, name)):
                raise Broken(size, "a whole number of bytes", name)
        times = {name: getattr(plan, name) for name in ("predicted_seconds", "baseline_seconds")}
        times |= {f"points[{i}].seconds": point.seconds for i, point in enumerate(plan.points)}
        for name, seconds in times.items():
            if not 0 <= seconds < _LARGEST:
                raise Broken(seconds, "seconds", name)
    return plan
