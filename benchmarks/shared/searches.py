"""Budgets that divide a range, statistics of their rows, and the surroundings of a search: replaced
parts, an empty cache, a separate process.
"""

import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from benchmarks.shared.results import found_of
from jaxmem._planner.search.history import History
from tests.shared import children

# A part that `replacing` takes: searches recall no earlier compile.
NO_HISTORY = History, "recall", lambda *args, **given: []


def between(least: int, most: int, count: int) -> dict[str, int]:
    """`count` budgets that divide a range evenly, its ends left out, by their share of it."""
    _, *inside, _ = from_to(least, most, count + 2)
    return {f"{i}/{count + 1}": budget for i, budget in enumerate(inside, start=1)}


def from_to(low: int, high: int, count: int) -> list[int]:
    """`count` budgets that divide a range evenly, its ends among them."""
    return [low + (high - low) * i // (count - 1) for i in range(count)]


def of_rows(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the rows of `Step.attempt` come to."""
    found, counts = found_of(rows)
    of = lambda key: [row[key] for row in found]
    return counts | {
        "most compiles": max(of("compiles")),
        "median compiles": statistics.median(of("compiles")),
        "median share of budget": statistics.median(of("share_of_budget")),
        "median prediction error": statistics.median(of("prediction_error")),
        "largest prediction error": max(of("prediction_error")),
    }


@contextlib.contextmanager
def replacing(*parts: tuple[Any, str, Any]) -> Iterator[None]:
    """While the statement runs, other objects are in the place of parts, each an owner, the name of
    its attribute, and the object.
    """
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(mock.patch.object(*part))
        yield


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """While the statement runs, this process has a cache folder of its own, which begins empty."""
    folder = tempfile.TemporaryDirectory()
    with folder as name, mock.patch.dict("os.environ", XDG_CACHE_HOME=name):
        yield


def printed(program: str, *arguments: str, **environment: str) -> Any:
    """The JSON in the last line that a Python program prints, in a process of its own."""
    environment = children.finding_packages() | environment
    done = children.python("-c", program, *arguments, environment=environment)
    return json.loads(done.stdout.splitlines()[-1])
