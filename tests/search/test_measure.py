"""Which of the steps that were run is taken: a lossy one only for what one would notice."""

import types

import pytest

from jaxmem._planner.search.measure import Runs, fastest_run

pytestmark = pytest.mark.core


def run(name: str, *rounds: float, lossy: bool = False) -> Runs:
    trial = types.SimpleNamespace(cost=types.SimpleNamespace(is_lossy=lossy))
    return Runs(name, trial, rounds)  # pyright: ignore


@pytest.mark.parametrize(
    ("lossy", "exact", "codecs_by_default", "taken"),
    [
        ([0.99] * 4, [1.0] * 4, True, "exact"),
        ([0.97] * 4, [1.0] * 4, True, "lossy"),
        ([0.97, 0.90, 1.04, 0.97], [1.0, 0.93, 1.07, 1.0], True, "exact"),  # within the spread
        ([0.99] * 4, [1.0] * 4, False, "lossy"),
        ([1.01] * 4, [1.0] * 4, True, "exact"),
    ],
)
def test_a_loss_must_be_noticed(lossy, exact, codecs_by_default, taken):
    runs = [run("lossy", *lossy, lossy=True), run("slow", *[2.0] * 4), run("exact", *exact)]
    assert fastest_run(codecs_by_default, runs).name == taken


def test_a_loss_is_taken_where_nothing_else_ran():
    assert fastest_run(True, [run("lossy", 1.0, lossy=True)]).name == "lossy"
