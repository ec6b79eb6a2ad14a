"""The scripts import, and each case of their tables is a case of its function."""

import importlib
import inspect
import pathlib

import pytest

import benchmarks
from benchmarks import budgets
from benchmarks.shared.results import RESULTS, Benchmark
from jaxmem._core.files import read_json

SCRIPTS = sorted(p.stem for p in pathlib.Path(benchmarks.__path__[0]).glob("[a-z]*.py"))
pytestmark = pytest.mark.jax_defaults


def words_of(case) -> tuple:
    return case if isinstance(case, tuple) else (case,)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_cases_of_each_benchmark_can_be_built(script):
    found = importlib.import_module(f"benchmarks.{script}").RESULTS
    assert len(found) > 0
    for name, benchmark in found.items():
        assert isinstance(benchmark, Benchmark), name
        assert (benchmark.run is None) != (benchmark.row is None), name
        cases = [words_of(case) for case in benchmark.cases]
        assert len(cases) > 0, name
        report = () if benchmark.run is None else (None,)
        for words in cases:
            inspect.signature(benchmark.run or benchmark.row).bind(*report, *words)


def test_each_model_of_the_result_is_a_case():
    rows = read_json(RESULTS / "foreign.json")["results"]
    measured = {key for key, row in rows.items() if "baseline" in row}
    assert measured == {", ".join(case) for case in budgets.FOREIGN}
