"""A plan that chooses how many microbatches a step takes: the fastest that fits, with its number in
the file.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, REST
from jaxmem._planner.microbatches import fastest_plan
from jaxmem.errors import BudgetError, PlanFileError, StepError
from tests.shared import tiny_lm

pytestmark = pytest.mark.jax_defaults


def build(plan, microbatches=1):
    return tiny_lm.released(jaxmem.adama(1e-3, accumulation_steps=microbatches), plan=plan)


def arguments():
    params = jax.eval_shape(functools.partial(tiny_lm.parameters, jnp.float32, width=64, vocab=64))
    return jax.eval_shape(build(None).init, params), jax.ShapeDtypeStruct((32, 65), jnp.int32)


@functools.cache
def whole():
    return jaxmem.plan(build, *arguments(), microbatches=(4, 1, 2))


def test_with_room_to_spare_it_is_one():
    assert whole().microbatches == 1
    assert whole().keeps_everything
    assert "; microbatches: 1" in str(whole())


def test_under_a_budget_more_are_taken_and_the_file_says_how_many(tmp_path):
    held = whole().parts.arguments  # a budget that holds no more than these
    with pytest.raises(BudgetError, match="least that compiled") as one:
        jaxmem.plan(build, *arguments(), microbatches=(1,), budget=held, actions=("keep",))
    budget = one.value.least_bytes - 1
    plan = jaxmem.plan(build, *arguments(), microbatches=(1, 2), budget=budget, actions=("keep",))
    assert plan.microbatches == 2, "the least with one microbatch is more"
    assert plan.compiled_bytes <= budget
    state = build(None).init(tiny_lm.parameters(jnp.float32, width=64, vocab=64))
    _, metrics = plan.step(state, tiny_lm.tokens(32, sequence=64, vocab=64))
    assert jnp.isfinite(metrics["loss"])
    plan.save(path := tmp_path / "plan.json")
    loaded = jaxmem.Plan.load(path)
    assert loaded.microbatches == plan.microbatches
    assert jaxmem.verify(loaded, build, *arguments()).compiled_bytes == plan.compiled_bytes
    assert jaxmem.explain(build, *arguments(), plan=loaded).total_bytes == plan.compiled_bytes
    path.write_text(
        path.read_text().replace(f'"microbatches": {plan.microbatches}', '"microbatches": 0')
    )
    with pytest.raises(PlanFileError, match="field `microbatches`: got 0"):
        jaxmem.Plan.load(path)


def test_none_that_fits_names_the_least():
    def plan_for(number):
        raise BudgetError(f"too small for {number}", least_bytes=100 // number)

    with pytest.raises(
        BudgetError, match="none of 1, 4 microbatches fits; the least, 25 B, is with 4: too small"
    ) as caught:
        fastest_plan([1, 4], plan_for)
    assert caught.value.least_bytes == 25


@pytest.mark.parametrize("numbers", [(), (0,), (1.5,), (True,), ("2",), (2, -1)])
def test_numbers_that_are_none_are_refused(numbers):
    with pytest.raises(StepError, match="`microbatches` is .*expected whole numbers of at least 1"):
        jaxmem.plan(build, *arguments(), microbatches=numbers)


def test_the_fastest_is_taken_and_the_search_ends_where_everything_is_kept():
    seconds, asked = {1: None, 2: 3.0, 4: 2.0, 8: 2.5}, []

    def plan_for(number):
        asked.append(number)
        if seconds[number] is None:
            raise BudgetError("too large", least_bytes=9)
        kept = {"block": {REST: KEEP} if number == 8 else {"in": KEEP}}
        return dataclasses.replace(whole(), predicted_seconds=seconds[number], actions=kept)

    assert fastest_plan([1, 2, 4, 8, 16], plan_for).microbatches == 4
    assert asked == [1, 2, 4, 8]
