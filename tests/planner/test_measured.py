"""`measure=`: what may be fastest is run in turns, and the fastest by the clock is returned."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, LOSSLESS, REST
from jaxmem._core.assignment import Assignment
from jaxmem._device.target import Target
from jaxmem._jax.step import trace
from jaxmem._profile.profile import profile
from jaxmem._search.measure import hand_policies
from jaxmem._xla.backend import Local
from tests.shared import models

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compiles")]
SHAPES = jax.eval_shape(
    lambda: (models.parameters(4, 64, jnp.float32), models.batch(8, 128, 64, jnp.float32))
)
build = models.build_with(models.scanned)


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Steps take so long as `seconds` says of how many bytes they take, and are not run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []

    def clocked(seconds):
        def run(self, steps, traced, args, for_seconds):
            told.append(for_seconds)
            return [[seconds(s.compiled.total_bytes) * f for f in (1.0, 1.1, 1.3)] for s in steps]

        monkeypatch.setattr(Local, "run", run)
        return told

    return clocked


def medians(plan):
    return {one.name: one.median for one in plan.measured}


def test_the_fastest_by_the_clock_is_returned(clock):
    told = clock(lambda size: size)  # the least bytes are the fastest
    plan = jaxmem.plan(build, *SHAPES, measure=3)
    assert 3 in told
    (chosen,) = [one for one in plan.measured if one.chosen]
    assert chosen.median == min(medians(plan).values())
    assert chosen.bytes == plan.compiled_bytes == min(one.bytes for one in plan.measured)
    assert not plan.keeps_everything, "although there was room"
    assert chosen.lower == pytest.approx(1.05 / 1.1 * chosen.median)
    assert chosen.upper == pytest.approx(1.2 / 1.1 * chosen.median)
    assert chosen.rounds == 3
    assert "which is chosen" in str(plan)
    assert set(plan.step(*_arrays())[0]) == set(SHAPES[0])


def _arrays():
    return models.parameters(4, 64, jnp.float32), models.batch(8, 128, 64, jnp.float32)


def test_everything_is_kept_where_that_runs_fastest(clock):
    clock(lambda size: 1 / size)
    plan = jaxmem.plan(build, *SHAPES, measure=3)
    assert plan.keeps_everything
    names = set(medians(plan))
    assert {"nothing kept", "every tag kept"} <= names, "each hand policy that fits is run"


def test_only_what_fits_is_run(clock):
    clock(lambda size: 1 / size)  # the most bytes are the fastest
    whole = jaxmem.plan(build, *SHAPES)
    budget = int(0.4 * whole.baseline_bytes)
    plan = jaxmem.plan(build, *SHAPES, budget=budget, measure=3)
    assert plan.compiled_bytes <= budget
    assert all(one.bytes <= budget for one in plan.measured)
    assert "everything kept" not in medians(plan)
    assert "nothing kept" in medians(plan)


def test_what_was_run_corrects_the_next_search(clock):
    clock(lambda size: 1.0)
    first = jaxmem.plan(build, *SHAPES, measure=3)
    assert not any("corrected" in note for note in first.notes)
    again = jaxmem.plan(build, *SHAPES)
    assert any("corrected by earlier runs of whole steps, in which" in note for note in again.notes)
    fresh = jaxmem.plan(build, *SHAPES, fresh=True)
    assert not any("corrected" in note for note in fresh.notes)


def test_a_file_holds_what_was_run(clock, tmp_path):
    clock(lambda size: size)
    plan = jaxmem.plan(build, *SHAPES, measure=3)
    plan.save(tmp_path / "plan.json")
    loaded = jaxmem.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.measured == plan.measured != ()
    assert dataclasses.replace(plan, measured=()) != plan


def test_steps_that_cannot_be_run_are_planned_with_a_note(clock, monkeypatch):
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


def test_hand_policies_are_those_of_names_and_of_products():

    traced = trace(build, Assignment.nothing(), SHAPES)[1]
    made = profile(traced.jaxpr, Local(Target.parse("local")), actions=LOSSLESS)
    found = hand_policies(made)
    (label,) = {b.name for b in made.blocks}
    tags = {t.name for b in made.blocks for t in b.tags}
    assert found["nothing kept"] == {label: {}}
    assert found["every tag kept"] == {label: dict.fromkeys(tags, KEEP)}
    products = set(found["products kept"][label])
    assert products < tags
    assert "up" in products
    assert "mask" not in products
    assert REST not in products
