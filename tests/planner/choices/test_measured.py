"""`measure=`: what may be fastest is run in turns, and the fastest by the clock is returned."""

import functools

import jax
import pytest

import jaxmem
from jaxmem._core.database import Timing
from jaxmem._result.plan.plan import pace
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.running import CannotRun
from jaxmem._trace.jaxpr import equations
from tests.shared import models

SHAPES = models.shapes(4, 64, 8, 128)
build = models.build_of(models.block)
CLOCKS = {"the least is fastest": lambda size: size, "the most is fastest": lambda size: 1 / size}


def slow_saving(self, jobs):
    """The seconds of saving in loops alone, so that recomputing is predicted to be faster."""
    loops = [[e for e in equations(job.jaxpr) if e.primitive.name == "scan"] for job in jobs]
    saved = [sum(v.aval.size for loop in found for v in loop.outvars) for found in loops]
    return [Timing(1e-12 + size, 0.0) for size in saved]


@pytest.fixture(scope="module")
def clocked(own_database, tmp_path_factory):
    """Plans of a clock that tells how long a step takes by its bytes; nothing is run."""
    asked: list[float] = []

    @functools.cache
    def plan_by(
        name: str, budget: int | None = None, measure: float | None = 3.0, folder="", run=None
    ):
        def clock(self, steps, traced, args, seconds):
            asked.append(seconds)
            told = [CLOCKS[name](step.total_bytes) for step in steps]
            return [[seconds * f for f in (1.0, 1.1, 1.3)] for seconds in told]

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folders[folder or name]))
            patch.setattr(Local, "run", run or clock)
            return jaxmem.plan(build, *SHAPES, budget=budget, measure=measure)

    folders = {
        name: tmp_path_factory.mktemp("cache") for name in (*CLOCKS, "slow saving", "runs once")
    }
    return plan_by, asked


def medians(plan):
    return {one.name: one.median for one in plan.measured}


def test_the_fastest_by_the_clock_is_returned(clocked):
    plan_by, asked = clocked
    plan = plan_by("the least is fastest")
    assert 1.5 in asked, "half of the time is for what is known, the rest for what that teaches"
    (chosen,) = [one for one in plan.measured if one.chosen]
    assert chosen.median == min(medians(plan).values())
    assert chosen.bytes == plan.compiled_bytes == min(one.bytes for one in plan.measured)
    assert not plan.keeps_everything, "although there was room"
    assert {"everything kept", chosen.name} <= set(medians(plan))
    assert pace(plan).endswith("less step time as measured")
    assert chosen.lower == pytest.approx(1.05 / 1.1 * chosen.median)
    assert chosen.upper == pytest.approx(1.2 / 1.1 * chosen.median)
    assert chosen.rounds == 3
    assert "which is chosen" in str(plan)
    assert set(plan.step(*models.arrays(4, 64, 8, 128))[0]) == set(SHAPES[0])


def test_everything_is_kept_where_that_runs_fastest(clocked):
    plan = clocked[0]("the most is fastest")
    assert plan.keeps_everything
    names = set(medians(plan))
    assert {"everything kept", "nothing kept", "every tag kept"} <= names, "all that fits is run"


def test_only_what_fits_is_run(clocked):
    budget = int(0.4 * clocked[0]("the most is fastest").baseline_bytes)
    plan = clocked[0]("the most is fastest", budget)
    assert plan.compiled_bytes <= budget
    assert all(one.bytes <= budget for one in plan.measured)
    assert "everything kept" not in medians(plan)
    assert "nothing kept" in medians(plan)


def test_what_was_run_corrects_the_next_search(clocked):
    first = clocked[0]("the least is fastest")
    assert not any("corrected" in note for note in first.notes)
    again = clocked[0]("the least is fastest", measure=None)
    assert any("corrected by earlier runs of whole steps, in which" in note for note in again.notes)


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_step_that_fits_takes_a_plan_only_if_the_plan_runs_faster(clocked, clock):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "times", slow_saving)
        plan = clocked[0](clock, measure=None, folder="slow saving")
    assert set(medians(plan)) == {"the plan", "everything kept"}
    assert plan.keeps_everything == (clock == "the most is fastest")


def test_a_step_that_runs_no_more_is_planned_by_predictions(clocked):
    clocked[0]("the most is fastest", measure=None, folder="runs once")  # its time is stored

    def run(self, steps, traced, args, seconds):
        raise CannotRun("its arguments are shapes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "times", slow_saving)
        plan = clocked[0]("the most is fastest", measure=None, folder="runs once", run=run)
    assert plan.baseline_source == "measured"
    assert not plan.measured
    assert not plan.keeps_everything


def test_steps_that_cannot_be_run_are_planned_with_a_note():
    def prints(plan):
        step = build(plan)

        def printing(*args):
            jax.debug.print("a step")
            return step(*args)

        return printing

    plan = jaxmem.plan(prints, *SHAPES, measure=3)
    assert plan.measured == ()
    assert any("nothing was run for `measure`" in note for note in plan.notes)


@pytest.mark.parametrize("measure", [0, -1, True, "30", float("inf"), float("nan")])
def test_seconds_that_are_none_are_refused(measure):
    with pytest.raises(jaxmem.errors.StepError, match="`measure` is .*; expected the seconds"):
        jaxmem.plan(build, *SHAPES, measure=measure)


def test_a_device_that_is_not_there_runs_nothing():
    with pytest.raises(jaxmem.errors.TargetError, match="'h200': steps are run on the device at"):
        jaxmem.plan(build, *SHAPES, target="h200", measure=3)
