"""Results that are written after each one, in a file that is always whole."""

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from scipy.stats import spearmanr

from benchmarks.shared.sources import Sources
from jaxmem._core.files import read_json, write_json
from jaxmem._core.versions import installed

RESULTS = pathlib.Path(__file__).parents[1] / "results"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-pjrt", "libtpu", "flax", "optax", "pulp", "highspy")


class Report:
    """The results of one script, read again by a run that goes on where another stopped.

    `numbers` are whole-number options of the command line with their defaults, `chosen` what they
    are. Results of other numbers, or of other versions, are not gone on with. Results that are gone
    on with keep the sources that were recorded for the first of them, so that they are listed as
    stale if any of them is.
    """

    def __init__(self, module: str, argv: Sequence[str] | None = None, **numbers: int):
        parser = argparse.ArgumentParser(
            f"python -m benchmarks.{module}",
            description=sys.modules["__main__"].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--out", type=pathlib.Path, default=RESULTS / f"{module}.json")
        parser.add_argument(
            "--fresh", action="store_true", help="forget the results that are there"
        )
        for name, default in numbers.items():
            parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
        args = parser.parse_args(argv)
        self.path, self.chosen = args.out, {name: getattr(args, name) for name in numbers}
        said = "".join(f" --{n} {v}" for n, v in self.chosen.items() if v != numbers[n])
        self.about: dict[str, Any] = {
            "command": f"python -m benchmarks.{module}{said}",
            "versions": versions(),
            "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        }
        self.about |= {"settings": self.chosen} if numbers else {}
        self.summary: dict[str, Any] | None = None
        self.results: dict[str, Any] = {}
        # Seconds of the runs before; None if the file does not say.
        self.before, self.start = 0.0, time.perf_counter()
        self.sources = Sources().record(f"benchmarks/{module}.py")
        if self.path.exists() and not args.fresh:
            old = read_json(self.path)
            if all(old.get(k, {}) == self.about.get(k, {}) for k in ("versions", "settings")):
                self.results, self.before = old["results"], old.get("seconds")
                self.sources = {key: old.get(key) for key in self.sources}

    def has(self, key: str) -> bool:
        return key in self.results

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

    def under(self, prefix: str) -> dict[str, Any]:
        """The results whose keys begin with a prefix, by the rest of their keys."""
        found = self.results.items()
        return {key.removeprefix(prefix): row for key, row in found if key.startswith(prefix)}

    def for_each(self, cases: Iterable, run: Callable, summary: Callable) -> None:
        """Calls `run(self, case)` for each case, or `run(self, *case)` for a tuple. Then writes
        `summary(self)`.
        """
        for _ in self._each(cases, run):
            pass
        self.summarise(summary(self))

    def of_each(self, cases: Iterable, run: Callable, of_case: Callable) -> None:
        """`for_each`, with a summary of each case as soon as it has run: `of_case(self, name)`,
        where the name is the words of the case.
        """
        found = {}
        for name in self._each(cases, run):
            found[name] = of_case(self, name)
            self.summarise(found)

    def rows(self, cases: Iterable, make: Callable, summary: Callable) -> None:
        """`for_each`, where `make(case)`, or `make(*case)`, is the one result of each case. Its key
        is the words of the case, between commas.
        """

        def run(report: Report, *words) -> None:
            report.once(", ".join(map(str, words)), make, *words)

        self.for_each(cases, run, summary)

    def _each(self, cases: Iterable, run: Callable) -> Iterator[str]:
        warnings.simplefilter("ignore")
        for case in cases:
            words = case if isinstance(case, tuple) else (case,)
            run(self, *words)
            yield " ".join(map(str, words))

    def write(self) -> None:
        now = time.perf_counter() - self.start
        seconds = {"seconds": None if self.before is None else round(self.before + now, 1)}
        summary = {} if self.summary is None else {"summary": self.summary}
        results = {"results": self.results}
        write_json(self.path, self.about | self.sources | seconds | summary | results)


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


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two orders agree: 1 where they are the same."""
    found: Any = spearmanr(one, other)
    return float(found.statistic)


def versions() -> dict[str, str]:
    found = {name: installed(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {n: v for n, v in found.items() if v}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
