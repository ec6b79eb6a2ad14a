"""A plan is revised while its model trains: for outliers that were counted, and for a device that
runs out of memory; parameters and data are as they would be. A fault of planning is a row, and does
not end the training; what was given up stays given up.
"""

import concurrent.futures
import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxmem
from jaxmem._train.rectifier.counts import Outliers, counted
from jaxmem._train.rectifier.decide import SETTLED
from jaxmem.errors import BudgetError, JaxmemWarning, StepError
from jaxmem.runs import Rectifier
from tests.shared import rectified
from tests.shared.rectified import ASKED, build, capacities, data, lines, parameters, rectifier, run
from tests.shared.refused import refused


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


def with_room(plan, capacity):
    """The plan with other room in its one codec, and no executable."""
    codec = f"outlier_separated(capacity={capacity})"
    other = lambda choice: dataclasses.replace(choice, codec=codec) if choice.codec else choice
    choices = {tag: other(choice) for tag, choice in plan.actions["block"].items()}
    return dataclasses.replace(plan, actions={"block": choices})


def counting(revising, *counts):
    """Lets the rectifier have counted these in the one tag's layers."""
    one = Outliers(1, "block", "up", 80, counts, (4.0,) * len(counts), ((),) * len(counts))
    revising._watch.recent = [counted([one])]


def settle(revising, seconds, times=1):
    """Lets the rectifier have seen enough steps that take `seconds`."""
    for _ in range(times * SETTLED):
        revising.told(seconds)


def made(plan=None, error=None):
    """A plan with its step, or an error, of a thread that has ended."""
    future = concurrent.futures.Future()
    future.set_exception(error) if error else future.set_result((plan, "a step"))
    return future


@pytest.mark.parametrize(
    "error",
    [
        JaxmemWarning("a warning"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while autotuning"),
        OSError(28, "No space left on device"),
        BudgetError("plan: none", least_bytes=3),
        TypeError(),
    ],
)
def test_errors_of_planning_are_rows(plan, error):
    revising = rectifier(plan)
    counting(revising, 4, 4, 4)
    revising._rooms, revising._made = {("block", "up"): 4}, made(error=error)
    step, (row,) = revising.ready(7, 100)
    assert step is None
    assert revising.plan is plan
    assert not row["taken"]
    assert row["why"].startswith(f"planning failed: {type(error).__name__}")


def test_errors_of_counting_are_one_row(plan):
    revising = rectifier(plan)

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: counting")

    revising.look(1, parameters(()), data(1))
    revising._watch._tracker.read = full
    found, (row,) = revising.seen(1)
    assert not found
    assert "nothing is tracked from here on: JaxRuntimeError: RESOURCE_EXHAUSTED" in row["why"]
    assert revising.look(2, parameters(()), data(2)) == []
    assert revising.seen(2) == ([], [])


def test_a_plan_that_ran_out_of_memory_does_not_come_back(plan):
    revising = rectifier(plan)
    settle(revising, 1.0)
    smaller = dataclasses.replace(with_room(plan, 3), compiled_bytes=plan.compiled_bytes // 2)
    revising._again.now = lambda *_: (smaller, "smaller")
    revising._made = made(plan)  # for the old budget
    step, _ = revising.less(9, RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert step == "smaller"
    settle(revising, 2.0, times=2)
    assert revising.ready(60, 1000) == (None, [])
    assert revising.plan is smaller
    # Nor is a plan taken that was made for more.
    revising._made = made(dataclasses.replace(with_room(plan, 1), predicted_seconds=0.0))
    _, (row,) = revising.ready(61, 1000)
    assert "memory ran out meanwhile" in row["why"]


def test_room_that_was_made_is_not_given_up_for_speed(plan):
    revising = rectifier(plan)
    counting(revising, 4, 2, 2)
    settle(revising, 1.0)
    revising._rooms, revising._made = {("block", "up"): 4}, made(with_room(plan, 4))
    _, (row,) = revising.ready(30, 100)
    assert row["event"] == "swap"
    counting(revising, 3, 2, 2)  # still more than the plan before has room for
    settle(revising, 5.0, times=2)
    assert revising.ready(90, 100) == (None, [])
    assert capacities(revising.plan.actions) == {("block", "up"): 4}
    revising.close()


def test_a_plan_without_room_is_replaced_after_a_resumption_too(plan):
    revising = rectifier(plan)
    counting(revising, 4, 2, 2)
    revising._made = concurrent.futures.Future()  # it is being made
    notes = json.loads(json.dumps(revising.notes()))
    again = rectifier(plan)
    slower = dataclasses.replace(with_room(plan, 4), predicted_seconds=2 * plan.predicted_seconds)
    again._again.begin = lambda *_: made(slower)
    assert again.restore(12, notes) == (None, [])
    step, (row,) = again.ready(13, 100)
    assert step == "a step"
    assert "has 4 outliers and room for 2" in row["why"]


def test_a_resumed_run_takes_the_plan_that_it_is_given(tmp_path, plan):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", plan, rectifier(plan), stop=3)
    smaller = rectified.planned(int(0.99 * plan.budget_bytes), **ASKED)
    revising = rectifier(smaller)
    run(tmp_path / "r", smaller, revising, steps=4)
    rows = lines(tmp_path / "r", "decisions.jsonl")
    assert any("and not its checkpoint's" in row["why"] for row in rows)
    assert revising.plan.budget_bytes == smaller.budget_bytes


def test_rows_are_cut_where_a_run_goes_back(tmp_path, plan):
    def step(state, x):
        state, metrics = plan.step(state, x)
        calls.append(1)
        return state, metrics | ({"loss": np.nan} if len(calls) == 7 else {})

    calls = []
    run(tmp_path / "r", plan, rectifier(plan, every=2), step=step, save_every=1e9, steps=12)
    steps = [row["step"] for row in lines(tmp_path / "r", "outliers.jsonl")]
    assert steps == sorted(set(steps))
    assert [row["step"] for row in lines(tmp_path / "r", "metrics.jsonl")] == [*range(1, 13)]


def test_a_wrapper_is_kept_when_plans_change(tmp_path, plan):
    def wrap(step):
        def wrapped(state, x):
            state, metrics = step(state, x)
            return state, metrics | {"rate": 0.5}

        return wrapped

    revising = rectifier(plan, wrap=wrap)
    run(tmp_path / "r", plan, revising, step=wrap(plan.step))
    assert capacities(revising.plan.actions) == {("block", "up"): 4}
    assert {row.get("rate") for row in lines(tmp_path / "r", "metrics.jsonl")} == {0.5}


def test_a_rectifier_trains_again(tmp_path, plan):
    """A run that begins anew repeats the steps of the first plan."""
    revising = rectifier(plan)
    first = run(tmp_path / "r", plan, revising)
    assert capacities(revising.plan.actions) == {("block", "up"): 4}
    again = run(tmp_path / "again", plan, revising)
    jax.tree.map(np.testing.assert_array_equal, again, first)


def test_planning_ends_with_the_training(plan):
    revising = rectifier(plan)
    counting(revising, 4, 4, 4)
    revising._again._ends.set()  # as `close` does, while it is being made
    revising._again._thread = concurrent.futures.ThreadPoolExecutor(1)
    future = revising._again.begin(plan.budget_bytes, {"block": {"up": 4}})
    with pytest.raises(StepError, match="the training that the plan was made beside has ended"):
        future.result()
    revising.close()


@refused(
    StepError,
    ({"codec": "int4"}, "got codec=; expected what `jaxmem.plan` chooses from: .*codecs"),
    ({"budget": 3}, "got budget="),
    ({"measure": 3.0}, "got measure="),
    ({"every": True}, "`every` is True"),
    ({"every": 0}, "`every` is 0; expected a number of steps"),
)
def test_arguments_that_are_not_a_rectifiers(wrong, plan):
    rectifier(plan, **wrong)


def test_what_is_no_plan_or_step_is_refused(plan):
    with pytest.raises(StepError, match="`plan` is NoneType"):
        Rectifier(None, build, 1)
    with pytest.raises(StepError, match="got no arguments of the step"):
        Rectifier(plan, build)
    keys = {"key": jax.random.key(0)}
    assert Rectifier(plan, build, keys)._again.args[0]["key"].dtype == keys["key"].dtype


def test_lossless_plans_are_not_made_anew(tmp_path, plan):
    revising = rectifier(plan, actions=jaxmem.plans.LOSSLESS)
    run(tmp_path / "r", plan, revising, steps=4)
    rows = lines(tmp_path / "r", "decisions.jsonl")
    assert {row["why"] for row in rows} == {"no action that compresses is allowed"}
