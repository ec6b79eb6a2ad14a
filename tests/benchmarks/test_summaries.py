"""The summaries of the committed results are what their scripts make of the results today."""

import functools
import importlib
import json
import math
import pathlib
from collections.abc import Iterator

import pytest

from benchmarks.shared.results import RESULTS, Report
from benchmarks.shared.sources import Sources

# Importing one sets the environment of libtpu; others are of a layout without `results`.
LEFT_OUT = {"tpu_codecs", "baselines_cpu", "stack_time"}
# Keys that a page quotes of a way that its script no longer measures.
QUOTED = {"adama_convergence": {"packed"}}
pytestmark = pytest.mark.jax_defaults


@pytest.fixture(scope="module", autouse=True)
def hashed_once():
    """All reports share one reading of the sources, which takes most of a summary's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.shared.results.Sources", functools.cache(Sources))
        yield


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


NAMES = [
    path.stem
    for path in sorted(RESULTS.glob("*.json"))
    if "summary" in read(path.stem) and path.stem not in LEFT_OUT
]


def summarised(name: str, found: dict, tmp_path: pathlib.Path) -> dict:
    path = Sources().script_of(name)
    script = pathlib.Path(path).stem
    report = Report(name, script, tmp_path)
    report.results = found["results"]
    # A case that was not measured yet has no summary.
    benchmark = importlib.import_module(f"benchmarks.{script}").RESULTS[name]
    return benchmark.summarised(report, found["summary"])


def without(summary, keys: set[str]):
    """A summary without some keys, at any depth."""
    if isinstance(summary, dict):
        return {k: without(v, keys) for k, v in summary.items() if k not in keys}
    return summary


def differences(old, new, at: str = "") -> Iterator[str]:
    """Where one has another value than the other, or a key that the other lacks."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() & new.keys():
            yield from differences(old[key], new[key], f"{at}/{key}")
        yield from (f"{at}/{key}: in one alone" for key in sorted(old.keys() ^ new.keys()))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new)):
            yield from differences(one, other, f"{at}/{i}")
    elif isinstance(old, float) and isinstance(new, float):
        if not math.isclose(old, new, rel_tol=1e-12):
            yield f"{at}: {old}, now {new}"
    elif old != new:
        yield f"{at}: {old}, now {new}"


@pytest.mark.parametrize("name", NAMES)
def test_a_summary_is_of_its_results(name, tmp_path):
    found = read(name)
    new = json.loads(json.dumps(summarised(name, found, tmp_path)))
    stored = without(found["summary"], QUOTED.get(name, set()))
    assert list(differences(stored, new)) == []
    assert len(new) > 0


def test_a_number_that_differs_is_found():
    assert list(differences([{"a": 1, "b": 2}], [{"a": 1, "b": 3}])) != []
    assert list(differences([1, 2], [1])) != []
    assert list(differences([{"a": 1, "b": 2}], [{"a": 1}])) != []
    assert list(differences({"a": {"b": 1.0}}, {"a": {"b": 1.5}})) != []
    assert list(differences({"a": {"b": 1.0}, "c": 2}, {"a": {"b": 1.0}, "d": 3})) != []
    assert list(differences({"a": {"b": 1.0}, "c": 2}, {"c": 2, "a": {"b": 1.0}})) == []
