"""Seconds of whole steps: what tells them, and how certain a difference is. Of the steps that were
run, a lossy one is taken only for what one would notice.
"""

import dataclasses
import types

import pytest

from jaxmem._core.actions import KEEP, OFFLOAD, UNTAGGED
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.measure import Runs, fastest_run
from jaxmem._planner.search.step_time import step_time_of
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
from tests.shared.profiles import INT4, chain, profile

MADE = dataclasses.replace(profile(chain(runs=10), link=100.0), uncertainty=0.5)
EVERYTHING = {UNTAGGED: KEEP}


def trial(tags, xla_seconds=None):
    actions = {"block": tags}
    compiled = Compiled(100, 40, 50, 40, 30, 0, xla_seconds, 0, 0, 1.0)
    return Trial(CompiledStep(actions, compiled), evaluate(MADE, actions), 100)


def step_time(baseline=None, measured=None):
    kept = dataclasses.replace(trial(EVERYTHING, baseline), measured_seconds=measured)
    return step_time_of(MADE, kept, Target.parse("h200"))


def test_a_run_tells_more_than_an_estimate_and_that_more_than_pieces():
    assert (step_time(20.0, 30.0).base, step_time(20.0, 30.0).source) == (30.0, "measured")
    assert (step_time(20.0).base, step_time(20.0).source) == (20.0, "xla")
    assert step_time().source == "pieces"
    assert step_time().base > MADE.step_seconds, "and what is outside of blocks"


def test_a_plan_costs_or_gains_what_its_pieces_do():
    now = step_time(measured=30.0)
    kept, coded, nothing = trial({"u": KEEP, "v": KEEP}), trial({"u": INT4}), trial({})
    for one in (kept, coded, nothing):
        apart = one.cost.seconds - trial(EVERYTHING).cost.seconds
        assert now.of(one) == pytest.approx(30.0 + apart)
    assert now.of(nothing) > 30.0
    assert now.seconds(trial(EVERYTHING).cost) == 30.0
    assert step_time(measured=1e-9).of(trial(EVERYTHING)) >= 0.0


def test_estimates_of_whole_steps_are_compared_with_each_other_alone():
    told = trial({}, xla_seconds=7.0)
    assert step_time(20.0).of(told) == 7.0
    assert step_time(20.0, measured=30.0).of(told) != 7.0, "the other is measured"
    assert step_time().of(told) != 7.0
    untold = step_time(20.0).of(trial({}))
    assert untold == pytest.approx(20.0 + trial({}).cost.seconds - trial(EVERYTHING).cost.seconds)


def test_copies_to_the_host_are_added_to_an_estimate_that_has_none():
    moved = trial({"u": OFFLOAD, "v": KEEP}, xla_seconds=7.0)
    exposed = sum(10 * cost.exposed_seconds for cost in moved.cost.blocks)
    assert moved.cost.host_seconds == pytest.approx(10 * 0.2 + exposed)
    assert moved.xla_seconds == pytest.approx(7.0 + moved.cost.host_seconds)


def test_what_both_steps_do_is_not_uncertain():
    now = step_time(measured=30.0)
    assert now.uncertainty_of(trial(EVERYTHING).cost) == 0.0
    kept, nothing = now.uncertainty_of(trial({"u": KEEP}).cost), now.uncertainty_of(trial({}).cost)
    everything = trial(EVERYTHING).cost.seconds  # of keeping alone
    assert nothing == pytest.approx(0.5 * (trial({}).cost.recompute_seconds + everything))
    assert 0 < kept < nothing


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
