"""plan(fresh=True) reads nothing that earlier plans timed, compiled or tried; others do."""

import pytest

import jaxmem
from jaxmem._core.database import Timing
from jaxmem._planner.search.history import History
from jaxmem._target.compile import backend
from tests.shared import models

used = pytest.mark.usefixtures("measured_times", "own_database")
pytestmark = used
build = models.build_of(models.narrow)


@pytest.fixture
def shapes(monkeypatch):
    """Of the arguments; with 8 MiB in place of 128 where a loop is timed that keeps its values."""
    monkeypatch.setattr("jaxmem._cost.profile.jobs.LAYER_BYTES", 2**18)
    return models.shapes(2, 16, 4, 32)


@pytest.fixture
def seen(monkeypatch):
    """How many pieces each plan measured, and which earlier compiles it recalled."""
    measured, recalled = [], []
    measure, recall = backend.measure_all, History.recall

    noted = lambda jobs: measured.append(len(jobs)) or measure(jobs)
    monkeypatch.setattr(backend, "measure_all", noted)
    noting = lambda history: recalled.append(found := recall(history)) or found
    monkeypatch.setattr(History, "recall", noting)
    return measured, recalled


def test_a_fresh_plan_reads_nothing_of_earlier_ones(shapes, seen):
    measured, recalled = seen
    jaxmem.plan(build, *shapes)
    jaxmem.plan(build, *shapes)
    jaxmem.plan(build, *shapes, fresh=True)
    pieces = measured[0]
    assert pieces > 5
    assert measured == [pieces, 0, pieces]
    first, second, fresh = map(len, recalled)
    assert first == fresh == 0 < second


def test_times_of_a_busy_machine_are_noted(shapes, monkeypatch):
    monkeypatch.setattr(backend, "measure_all", lambda jobs: [Timing(1e-4, 0.5)] * len(jobs))
    plan = jaxmem.plan(build, *shapes, fresh=True)
    assert "100% of the times were measured while the machine was busy" in plan.notes[-1]
    assert "`fresh=True`" in str(plan)
    monkeypatch.setattr(backend, "measure_all", lambda jobs: [Timing(1e-4, 0.1)] * len(jobs))
    quiet = jaxmem.plan(build, *shapes, fresh=True)
    assert not any("busy" in note for note in quiet.notes)
