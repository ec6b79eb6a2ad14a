"""What a plan, or the error of a budget, says of values that only `checkpoint_name` names."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.errors import BudgetError
from tests.shared import models

pytestmark = [
    pytest.mark.core,
    pytest.mark.jax_defaults,
    pytest.mark.usefixtures("own_database"),
]
SHAPES = models.shapes(6, 64, 8, 128)


def block(x, p, key):
    """The block's input too has a name, so that codes may take its place."""
    x = checkpoint_name(x, "in")
    up = checkpoint_name(x @ p["up"], "up")
    return x + checkpoint_name(jnp.tanh(up) * up, "act") @ p["down"]


plan = functools.partial(
    jaxmem.plan, models.build_with(functools.partial(models.scanned, block=block)), *SHAPES
)


@functools.cache
def least() -> int:
    """The least bytes that compile without codecs."""
    held = sum(a.size * 4 for a in jax.tree.leaves(SHAPES))
    with pytest.raises(BudgetError) as caught:
        plan(budget=held + 1000)
    assert "compressing" not in str(caught.value), "no codec meets so little"
    return caught.value.least_bytes


def test_a_budget_that_only_codecs_meet_is_met_if_asked_and_the_error_says_so():
    budget = int(0.97 * least())
    with pytest.raises(BudgetError, match="would have met it, with") as caught:
        plan(budget=budget)
    assert str(caught.value).endswith('it was not asked for: give actions="all"')
    said = re.findall("'([a-z]+)'", str(caught.value).partition("compressing")[2])
    assert {*said} <= {"in", "up", "act"}
    asked = plan(budget=budget, actions="all")
    assert asked.compiled_bytes <= budget
    assert any(row.choice.action.compresses for row in asked.rows)


def test_where_codecs_were_refused_nothing_is_said_of_them():
    with pytest.raises(BudgetError) as caught:
        plan(budget=int(0.97 * least()), actions="lossless")
    assert "compressing" not in str(caught.value)
