"""Benchmarks, and their results: a file is written after each row, and is always whole.

A script of `benchmarks/` defines its benchmarks in a table `RESULTS`, by the name of their result's
file, and calls `measure`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax

from benchmarks.shared.sources import Sources
from jaxmem._core.files import read_json, write_json
from jaxmem._core.versions import installed

RESULTS = pathlib.Path(__file__).parents[1] / "results"
T = TypeVar("T")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-pjrt", "libtpu", "flax", "optax", "pulp", "highspy")


class Report:
    """The rows of one result, read again by a run that continues an earlier run.

    script: the script that writes the result.
    out: the folder of the result's file.
    fresh: whether the results that are there are forgotten.

    Results of other versions are not continued. Results that are continued keep the commit that was
    recorded for the first of them, so that they are listed as stale if any of them is.
    """

    def __init__(self, name: str, script: str, out: pathlib.Path = RESULTS, fresh: bool = False):
        self.path = out / f"{name}.json"
        self.about: dict[str, Any] = {
            "command": f"python -m benchmarks.{script}" + ("" if script == name else f" {name}"),
            "versions": versions(),
            "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        }
        self.summary: dict[str, Any] | None = None
        self.results: dict[str, Any] = {}
        # Seconds of the runs before; None if the file does not say.
        self.before, self.start = 0.0, time.perf_counter()
        self.sources = Sources().record(f"benchmarks/{script}.py")
        if self.path.exists() and not fresh:
            old = read_json(self.path)
            if old.get("versions") == self.about["versions"]:
                self.results, self.before = old["results"], old.get("seconds")
                self.sources = {key: old.get(key) for key in self.sources}

    def has(self, *keys: str) -> bool:
        return all(key in self.results for key in keys)

    def __getitem__(self, key: str):
        return self.results[key]

    def once(self, key: str, make: Callable, *args, **given) -> Any:
        """The result of a key, which `make(*args, **given)` returns if it is not there yet."""
        if key not in self.results:
            self.add(key, make(*args, **given))
        return self.results[key]

    def add(self, key: str, value) -> None:
        """One more result, written at once."""
        self.results[key] = value
        self.write()
        print(f"{key}: {json.dumps(value)}", flush=True)

    def summarise(self, summary: dict) -> None:
        self.summary = summary
        self.write()
        print(json.dumps(summary, indent=1))

    def once_each(self, prefix: str, values: Mapping[str, Any], make: Callable, *args) -> None:
        """`make(*args, value)` of each value, once. The key is the prefix and the value's name."""
        for name, value in values.items():
            self.once(f"{prefix}{name}", make, *args, value)

    def under(self, prefix: str) -> dict[str, Any]:
        """The results whose keys begin with a prefix, by the rest of their keys."""
        found = self.results.items()
        return {key.removeprefix(prefix): row for key, row in found if key.startswith(prefix)}

    def write(self) -> None:
        now = time.perf_counter() - self.start
        seconds = {"seconds": None if self.before is None else round(self.before + now, 1)}
        summary = {} if self.summary is None else {"summary": self.summary}
        results = {"results": self.results}
        write_json(self.path, self.about | self.sources | seconds | summary | results)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What is measured for one result.

    cases: the table of cases. A case is a tuple, or a single value.
    run: `run(report, *case)` measures a case and adds its rows.
    row: `row(*case)` returns the one row of a case, whose key is the case's words, joined by
      `joint`. It replaces `run`.
    summary: `summary(report)` summarises the rows and reads nothing else.
    of_case: `of_case(report, name)` summarises the rows of one case, as soon as it is measured. The
      name is the case's words. It replaces `summary`.
    """

    cases: Iterable = ((),)
    run: Callable | None = None
    summary: Callable[..., dict] | None = None
    row: Callable | None = None
    of_case: Callable[..., dict] | None = None
    joint: str = ", "

    def summarised(self, report: Report, names: Iterable[str]) -> dict:
        """The summary of all rows, or of the named cases."""
        if self.of_case is None:
            return self.summary(report) if self.summary else {}
        return {name: self.of_case(report, name) for name in names}

    def write(self, report: Report) -> None:
        warnings.simplefilter("ignore")
        done = []
        for case in self.cases:
            words = case if isinstance(case, tuple) else (case,)
            if self.run:
                self.run(report, *words)
            elif self.row:
                report.once(self.joint.join(map(str, words)), self.row, *words)
            done.append(" ".join(map(str, words)))
            if self.of_case:
                report.summarise(self.summarised(report, done))
        if self.summary:
            report.summarise(self.summary(report))


def measure(script: str, benchmarks: Mapping[str, Benchmark]) -> None:
    """Measures the results that the command line names; all results of the script by default."""
    reader = argparse.ArgumentParser(f"python -m benchmarks.{script}")
    reader.description = sys.modules["__main__"].__doc__
    reader.formatter_class = argparse.RawDescriptionHelpFormatter
    reader.add_argument("results", nargs="*", choices=benchmarks, help="default: all results")
    reader.add_argument("--out", type=pathlib.Path, default=RESULTS, help="the folder of the files")
    reader.add_argument("--fresh", action="store_true", help="forget the results that are there")
    args = reader.parse_args()
    for name in args.results or benchmarks:
        benchmarks[name].write(Report(name, script, args.out, args.fresh))


def timed(function: Callable[..., T], *args, **given) -> tuple[T, float]:
    """Returns what a function returns, and the seconds of the call."""
    start = time.perf_counter()
    made = function(*args, **given)
    return made, time.perf_counter() - start


def known(value: T | None) -> T:
    """Returns `value`, which is not None in this case."""
    assert value is not None
    return value


def found_of(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows of `Step.attempt` that have a plan; and the numbers of budgets, of plans, and of
    plans within their budget.
    """
    rows = list(rows)
    found = [row for row in rows if row["found"]]
    within = sum(row["share_of_budget"] <= 1 for row in found)
    return found, {"budgets": len(rows), "found": len(found), "within": within}


def of_errors(errors: Iterable[float]) -> dict[str, float]:
    """What signed relative errors come to. All but the last number are of their sizes."""
    errors = list(errors)
    sizes = sorted(map(abs, errors))
    return {
        "median error": statistics.median(sizes),
        "90 % are within": sizes[int(0.9 * (len(sizes) - 1))],
        "worst": sizes[-1],
        "median, with its sign": statistics.median(errors),
    }


def versions() -> dict[str, str]:
    found = {name: installed(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {n: v for n, v in found.items() if v}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
