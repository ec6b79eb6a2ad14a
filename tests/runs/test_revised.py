"""A plan is revised while its model trains: for outliers that were counted, and for a device that
runs out of memory; parameters and data are as they would be.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jaxmem
from jaxmem._train.rectifier.decide import SETTLED
from jaxmem.errors import BudgetError, StepError
from jaxmem.runs import Rectifier
from tests.shared import rectified
from tests.shared.rectified import ASKED, build, capacities, data, lines, parameters, rectifier, run


def swaps(out):
    return [row for row in lines(out, "decisions.jsonl") if row.get("event") == "swap"]


def test_outliers_without_room_are_given_room(tmp_path, plan):
    revising = rectifier(plan)
    state = run(tmp_path / "r", plan, revising)
    # What was decided, and when.
    (swap,) = swaps(tmp_path / "r")
    assert swap["taken"]
    assert "has 4 outliers and room for 2" in swap["why"]
    assert rectified.LOUD <= swap["step"] <= rectified.LOUD + 4
    assert swap["changed"], swap
    # The plan is the one that planning anew gives.
    counts = revising.counts
    assert counts == {"block": {"up": 4}}
    again = rectified.planned(plan.budget_bytes, outliers=counts, **ASKED)
    assert revising.plan.actions == again.actions != plan.actions
    assert capacities(again.actions) == {("block", "up"): 4}
    assert jaxmem.runs.read(tmp_path / "r").plan.actions == again.actions
    # State and losses are those of the two steps by hand.
    by_hand, losses = parameters(()), []
    for number in range(1, rectified.STEPS + 1):
        now = plan if number <= swap["step"] else again
        by_hand, metrics = now.step(by_hand, data(number))
        losses.append(float(metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, state, by_hand)
    metrics = lines(tmp_path / "r", "metrics.jsonl")
    assert [row["loss"] for row in metrics] == losses
    # What was counted, at which steps.
    seen = lines(tmp_path / "r", "outliers.jsonl")
    assert sorted({row["step"] for row in seen}) == [1, 2, 4, 8, 12, 16, 20, 24]
    beyond = {row["step"]: row["outliers_beyond_room"] for row in metrics if "outlier_rate" in row}
    assert beyond[8] == 0 < beyond[12]
    assert beyond[16] == 0


@pytest.mark.slow
def test_a_run_goes_on_under_the_plan_that_it_had(tmp_path, plan):
    whole = run(tmp_path / "whole", plan, rectifier(plan))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", plan, rectifier(plan), stop=19)
    revising = rectifier(plan)
    state = run(tmp_path / "cut", plan, revising)
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    assert capacities(revising.plan.actions) == {("block", "up"): 4}
    for name in ("metrics.jsonl", "outliers.jsonl"):
        cut, whole = (
            [{k: v for k, v in row.items() if "seconds" not in k} for row in lines(out, name)]
            for out in (tmp_path / "cut", tmp_path / "whole")
        )
        assert cut == whole
    decided = lambda row: (row["step"], row["taken"], row.get("event"))
    cut, whole = (lines(tmp_path / out, "decisions.jsonl") for out in ("cut", "whole"))
    assert [*map(decided, cut)] == [*map(decided, whole)]


def test_room_that_no_plan_gains_by_is_declined(tmp_path, plan):
    revising = rectifier(plan)
    run(tmp_path / "r", plan, revising, steps=8)
    decisions = lines(tmp_path / "r", "decisions.jsonl")
    assert [row["taken"] for row in decisions] == [False] * len(decisions)
    assert decisions
    assert "no plan could gain as much" in decisions[0]["why"]
    assert decisions[0]["most_gained"] * decisions[0]["left"] <= decisions[0]["planning"]
    assert "room is needed as before" in decisions[1]["why"]
    assert revising.plan is plan


class Full(jax.errors.JaxRuntimeError):
    """What JAX raises where a device has no room."""


def short_of_memory(step, times, taken=False):
    """A step that runs out of memory `times` times in a row, as its state is taken or is not."""
    left = [times]

    def call(state, x):
        if left[0]:
            left[0] -= 1
            if taken:
                jax.tree.map(lambda a: a.delete(), state)
            raise Full("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nmore")
        return step(state, x)

    return call


@pytest.mark.quick("True")
@pytest.mark.parametrize("taken", [False, True])
def test_a_step_that_runs_out_of_memory_is_planned_for_less(tmp_path, kept, taken):
    plan, calls = kept, []
    revising = rectified.Waiting(plan, build, parameters(()), data(1))

    def step(state, x):
        calls.append(1)
        return short_of_memory(plan.step, int(len(calls) == 4), taken)(state, x)

    run(tmp_path / "r", plan, revising, step=step, steps=6, keep=3, save_every=0)
    (row,) = swaps(tmp_path / "r")
    assert row["why"].startswith("out of memory: RESOURCE_EXHAUSTED: Out of memory while")
    least = min(plan.budget_bytes, plan.compiled_bytes)
    assert revising.plan.budget_bytes == int(0.9 * least)
    assert revising.plan.compiled_bytes <= int(0.9 * least)
    assert len(calls) == 4  # the other plan's step went on
    assert [row["step"] for row in lines(tmp_path / "r", "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_what_holds_the_memory_is_told_where_no_plan_takes_less(tmp_path, plan):
    full = short_of_memory(plan.step, 99)
    smallest = rectifier(plan)
    smallest._again.now = lambda *_: (_ for _ in ()).throw(BudgetError("none", least_bytes=7))
    with pytest.raises(BudgetError, match="step 1 ran out of memory .*no plan takes") as error:
        run(tmp_path / "r", plan, smallest, step=full)
    assert "what" in str(error.value)
    assert "arguments" in str(error.value)
    assert error.value.least_bytes == 7


def test_without_a_rectifier_the_error_says_what_to_do(tmp_path, plan):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        run(tmp_path / "r", plan, None, step=short_of_memory(plan.step, 1))
    assert any("give it a rectifier" in note for note in error.value.__notes__)


def settled(revising, plan):
    """Steps take a second each, until another plan takes the place of the rectifier's."""
    for _ in range(SETTLED):
        revising.told(1.0)
    revising._swap(30, plan, "another step", "it is faster", for_speed=True)


def test_a_plan_whose_steps_are_slower_goes_back(plan):
    revising = rectifier(plan)
    settled(revising, dataclasses.replace(plan))  # without an executable
    for _ in range(SETTLED - 1):
        revising.told(1.1)
    assert revising.ready(50, 9) == (None, [])
    revising.told(1.1)
    step, (row,) = revising.ready(51, 9)
    assert step is plan.step
    assert (row["median"], row["before"]) == (1.1, 1.0)
    assert revising.ready(52, 9) == (None, [])


def test_what_plans_take_by_the_clock_prices_later_plans(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    revising = rectifier(plan)
    again = rectified.planned(plan.budget_bytes, **ASKED)
    settled(revising, dataclasses.replace(again, actions={"block": {}}))
    for _ in range(SETTLED):
        revising.told(1.0 + 40 * plan.predicted_seconds)
    revising.ready(50, 9)
    revising.close()  # waits for what is written down
    corrected = rectified.planned(plan.budget_bytes, **ASKED)
    assert any("corrected by earlier runs of whole steps" in note for note in corrected.notes)
    assert not any("corrected by" in note for note in again.notes)


def test_tracking_that_takes_too_much_is_left_out(tmp_path, plan):
    small = dataclasses.replace(plan, budget_bytes=1000)
    revising = rectifier(small)
    run(tmp_path / "r", small, revising, step=plan.step, steps=4)
    (row,) = lines(tmp_path / "r", "decisions.jsonl")
    assert "counting takes" in row["why"]
    assert "of a budget of 1,000" in row["why"]
    assert not (tmp_path / "r" / "outliers.jsonl").exists()


def test_a_plan_that_divides_states_is_refused(plan):
    with pytest.raises(StepError, match="divides states over devices"):
        rectifier(dataclasses.replace(plan, divided="states"))


def test_the_arrays_that_it_is_given_are_let_go(plan):
    args = parameters(()), data(1)
    revising = Rectifier(plan, build, *args, **ASKED)
    leaves = jax.tree.leaves(revising._again.args)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert [leaf.shape for leaf in leaves] == [a.shape for a in jax.tree.leaves(args)]
