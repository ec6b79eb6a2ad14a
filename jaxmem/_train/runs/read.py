"""Reads the files in a run's folder: plan, metrics, summary and others.

An error names the file, and the line or the field that is broken.
"""

import dataclasses
import json
import math
import os
import pathlib
import reprlib
from collections.abc import Iterator
from typing import Any, NoReturn, TypeGuard

from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.memory.file import load
from jaxmem._result.plan.plan import Plan
from jaxmem._train.rectifier.counts import Outliers
from jaxmem.errors import PlanFileError

PLAN, METRICS, SUMMARY = "plan.json", "metrics.jsonl", "summary.json"
EXPLAINED, SAMPLE = "explained.json", "sample.txt"
DECISIONS, OUTLIERS = "decisions.jsonl", "outliers.jsonl"
# fields of a summary that the page shows, and so are checked; others may hold anything
_NUMBERS = (
    "first_loss", "final_loss", "val_loss", "tokens_per_second", "steps", "compiled_bytes",
    "baseline_bytes", "peak_bytes",
)  # fmt: skip
_TEXTS = ("config", "command", "policy", "target", "jax_version")
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
    """Reads what a folder holds beside its plan, and returns both as a run. Every file may be
    missing.
    """
    folder = pathlib.Path(folder)
    summary = _summary(folder / SUMMARY) if (folder / SUMMARY).exists() else {}
    losses, paces = _rows(folder / METRICS) if (folder / METRICS).exists() else ((), ())
    explained = load(folder / EXPLAINED) if (folder / EXPLAINED).exists() else None
    name = str(summary.get("config") or folder.absolute().name)
    outliers = tuple(_seen(folder / OUTLIERS))
    decisions = tuple(_objects(folder / DECISIONS, _DECIDED))
    return Run(name, plan, losses, summary, explained, paces, outliers, decisions)


def told_apart(runs: list[Run], sources: list[str]) -> list[Run]:
    """The runs under names that differ. Where several have one name, each is named by its path in
    `sources`; where that comes twice too, a number is added.
    """
    names = [run.name for run in runs]
    names = [source if names.count(name) > 1 else name for name, source in zip(names, sources)]
    names = [f"{n} ({i + 1})" if names.count(n) > 1 else n for i, n in enumerate(names)]
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names)]


Course = tuple[tuple[float, float], ...]  # (step, number)


def _rows(path: pathlib.Path) -> tuple[Course, Course]:
    """(step, loss) of each row, and (step, seconds) of those that have them. A row may hold other
    numbers, which are not read, and no loss.
    """
    losses, paces = [], []
    # not `splitlines`, which also breaks at separators that a JSON text may hold
    for number, text in enumerate(_text(path).split("\n"), 1):
        if not text.strip():
            continue
        row = _parse(text, path, number)
        if not isinstance(row, dict):
            _fail(path, f"line {number}", row, 'an object such as {"step": 1, "loss": 5.5}')
        step, loss = row.get("step"), row.get("loss")
        if not _is_number(step) or not abs(step) < _LARGEST:
            _fail(path, f"line {number}, field `step`", step, "a number")
        if loss is not None and not _is_number(loss):
            _fail(path, f"line {number}, field `loss`", loss, "a number or null")
        losses.append(
            (float(step), float(loss) if loss is not None and abs(loss) < _LARGEST else math.nan)
        )
        seconds = row.get("step_seconds")
        if seconds is not None and not (_is_number(seconds) and not seconds < 0):
            at = f"line {number}, field `step_seconds`"
            _fail(path, at, seconds, "a number of at least 0, or null")
        if seconds is not None and seconds < _LARGEST:
            paces.append((float(step), float(seconds)))
    return tuple(losses), tuple(paces)


# fields of the rows of a rectifier, with what they are
_SEEN = {"step": int, "block": str, "tag": str, "channels": int, "counts": list, "places": list}
_SEEN |= {"greatest": list}
_DECIDED = {"step": int, "taken": bool, "why": str}


def _seen(path: pathlib.Path) -> Iterator[Outliers]:
    for row in _objects(path, _SEEN):
        try:
            yield Outliers.from_json(row)
        except (ValueError, TypeError) as error:
            _fail(path, f"the row of step {row['step']}", row, f"counts of outliers ({error})")


def _objects(path: pathlib.Path, fields: dict[str, type]) -> Iterator[dict[str, Any]]:
    """The rows of a file that may be missing, which have these fields at least."""
    if not path.exists():
        return
    for number, text in enumerate(_text(path).split("\n"), 1):
        if not text.strip():
            continue
        row = _parse(text, path, number)
        if not isinstance(row, dict):
            _fail(path, f"line {number}", row, f"an object with {', '.join(fields)}")
        for name, kind in fields.items():
            if type(row.get(name)) is not kind:
                at = f"line {number}, field `{name}`"
                _fail(path, at, row.get(name), f"a value of type {kind.__name__}")
        yield row


def _summary(path: pathlib.Path) -> dict[str, Any]:
    """The summary, whose fields are checked where the page shows them."""
    data = _parse(_text(path), path)
    if not isinstance(data, dict):
        _fail(path, "(the whole file)", type(data).__name__, "an object")
    for name in _NUMBERS:
        if data.get(name) is not None and not _is_number(data[name]):
            _fail(path, f"field `{name}`", data[name], "a number or null")
    for name in _TEXTS:
        if data.get(name) is not None and not isinstance(data[name], str):
            _fail(path, f"field `{name}`", data[name], "a text or null")
    return data


def checked(plan: Plan, path: pathlib.Path) -> Plan:
    """Returns the plan if its numbers can be drawn, and raises PlanFileError if not. `path` is what
    the error calls its file.
    """
    for name in (
        "budget_bytes",
        "predicted_bytes",
        "compiled_bytes",
        "baseline_bytes",
        "host_bytes",
    ):
        if not _is_size(getattr(plan, name)):
            _fail(path, f"field `{name}`", getattr(plan, name), "a whole number of bytes")
    times = {"predicted_seconds": plan.predicted_seconds, "baseline_seconds": plan.baseline_seconds}
    times |= {f"points[{i}].seconds": point.seconds for i, point in enumerate(plan.points)}
    for name, seconds in times.items():
        if not 0 <= seconds < _LARGEST:
            _fail(path, f"field `{name}`", seconds, "seconds")
    return plan


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(
            f"report: cannot read {str(path)!r}: {error}; expected a text that a run wrote"
        ) from error


def _parse(text: str, path: pathlib.Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f", line {line}" if line else ""
        raise PlanFileError(
            f"report: {str(path)!r}{at}: {error}; expected JSON; mend or remove it"
        ) from error


def _fail(path: pathlib.Path, where: str, got: Any, expected: str) -> NoReturn:
    raise PlanFileError(
        f"report: {str(path)!r}, {where}: got {reprlib.repr(got)}, expected {expected}; mend or"
        " remove it"
    )


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether JSON's value is a number that a float can stand for; a bool is none."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
