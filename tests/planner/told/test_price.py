"""`jaxmem.plans.price`: compiled bytes and the prices of each choice of a hand-written assignment.
The advice of a plan, or of a BudgetError, about values that only `checkpoint_name` names.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.errors import BudgetError, TagError
from jaxmem.plans import Assignment, Choice, estimate, price
from tests.shared import models
from tests.shared.refused import refused

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
SIZES = 4, 64, 8, 128
SHAPES = models.shapes(*SIZES)
build = models.build_of(models.block)
BY_HAND = Assignment({"block": {"up": Choice("keep"), "mask": Choice("compress", "bit_mask()")}})


def compiled_bytes(plan) -> int:
    step = jax.jit(build(plan), donate_argnums=0)
    return jaxmem.plans.compiled_bytes(step.lower(*SHAPES).compile())


def test_an_assignment_is_told_as_it_compiles():
    priced = price(build, BY_HAND, *SHAPES)
    assert priced.compiled_bytes == priced.budget_bytes == compiled_bytes(BY_HAND)
    assert priced.baseline_bytes == compiled_bytes(None)
    assert priced.choices_for("block")["up"] == Choice("keep")
    rows = {row.tag: row for row in priced.rows}
    assert rows["mask"].bytes_after < rows["mask"].bytes_before == rows["mask"].bytes_after * 8
    assert priced.predicted_seconds > 0
    assert jnp.isfinite(priced.step(*models.arrays(*SIZES))[1])


def test_no_plan_is_slower_than_what_is_written_by_hand_at_its_bytes():
    priced = price(build, BY_HAND, *SHAPES)
    plan = jaxmem.plan(build, *SHAPES, budget=priced.compiled_bytes)
    assert plan.compiled_bytes <= priced.compiled_bytes
    assert plan.predicted_seconds <= priced.predicted_seconds


def test_an_estimate_tells_much_of_what_a_compile_tells():
    for assignment in (BY_HAND, Assignment.nothing(), Assignment.everything()):
        told, priced = (one(build, assignment, *SHAPES) for one in (estimate, price))
        assert priced.keeps_everything == (assignment == Assignment.everything())
        assert priced.keeps_everything == (priced.compiled_bytes == priced.baseline_bytes)
        assert priced.keeps_everything == (priced.predicted_seconds == priced.baseline_seconds)
        assert told.arguments_bytes == priced.parts.arguments
        assert told.saved_bytes == priced.parts.saved or priced.keeps_everything
        assert told.bytes == pytest.approx(priced.compiled_bytes, rel=0.3)
        assert told.baseline_bytes == pytest.approx(priced.baseline_bytes, rel=0.1)
        more = priced.predicted_seconds - priced.baseline_seconds
        assert told.seconds_more == pytest.approx(more, abs=1e-9)
        assert told.time_source == priced.time_source


def test_groups_of_layers_are_priced_apart():
    def layer(w, x):
        return x + jaxmem.tag(jnp.tanh(jaxmem.tag(x @ w, "up")), "out") @ w.T

    def stacked(plan):
        def step(w, x):
            loss = lambda w: (jaxmem.stack(layer, w, x, plan=plan) ** 2).mean()
            return w - jax.grad(loss)(w)

        return step

    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 64, 64), (256, 64)))
    kept, other = {"up": Choice("keep")}, {}
    apart = Assignment({"block[0:4]": kept, "block[4:6]": other})
    sizes = [price(stacked, a, *args) for a in (Assignment({"block": other}), apart)]
    assert sizes[0].parts.saved < sizes[1].parts.saved
    assert {row.block for row in sizes[1].rows} == {"block[0:4]", "block[4:6]"}
    for wrong in ({"block[0:4]": kept}, {"block[0:4]": kept, "block[3:6]": kept}):
        with pytest.raises(TagError, match="and block 'block' has 6 layers; groups follow"):
            price(stacked, Assignment(wrong), *args)
    with pytest.raises(TagError, match="and block 'block' cannot be divided"):
        price(build, Assignment({"block[0:2]": kept, "block[2:4]": kept}), *SHAPES)


@refused(
    TagError,
    ({"blok": {}}, "knows no block 'block'"),
    ({"block": {}, "blok": {}}, "names block 'blok'; the step has 'block'"),
    ({"block": {"upp": Choice("keep")}}, r"names tags \['upp'\]"),
    ({"block": {"up": Choice("offload")}}, "has no price"),
)
def test_what_the_step_lacks_is_named(assignment):
    price(build, Assignment(assignment), *SHAPES)


def test_other_objects_are_refused():
    with pytest.raises(TagError, match="`assignment` is dict; expected a"):
        price(build, {"block": {}}, *SHAPES)


DEEP = models.shapes(6, 64, 8, 128)


def named(x, p, key):
    """The block's input too has a name, so that codes may take its place."""
    x = checkpoint_name(x, "in")
    up = checkpoint_name(x @ p["up"], "up")
    return x + checkpoint_name(jnp.tanh(up) * up, "act") @ p["down"]


plan_deep = functools.partial(jaxmem.plan, models.build_of(named), *DEEP)


@functools.cache
def least() -> int:
    """The least bytes that compile without codecs."""
    held = sum(a.size * 4 for a in jax.tree.leaves(DEEP))
    with pytest.raises(BudgetError) as caught:
        plan_deep(budget=held + 1000)
    assert "compressing" not in str(caught.value), "no codec meets so little"
    return caught.value.least_bytes


def test_a_budget_that_only_codecs_meet_is_met_if_asked_and_the_error_says_so():
    budget = int(0.97 * least())
    with pytest.raises(BudgetError, match="would have met it, with") as caught:
        plan_deep(budget=budget)
    assert str(caught.value).endswith('it was not asked for: give actions="all"')
    said = re.findall("'([a-z]+)'", str(caught.value).partition("compressing")[2])
    assert {*said} <= {"in", "up", "act"}
    asked = plan_deep(budget=budget, actions="all")
    assert asked.compiled_bytes <= budget
    assert any(row.choice.action.names_codec for row in asked.rows)


def test_where_codecs_were_refused_nothing_is_said_of_them():
    with pytest.raises(BudgetError) as caught:
        plan_deep(budget=int(0.97 * least()), actions="lossless")
    assert "compressing" not in str(caught.value)


def test_what_codecs_would_spare_is_said_where_nobody_asked_for_them():
    plan, asked = (plan_deep(budget=int(1.05 * least()), actions=a) for a in (None, "all"))
    (note,) = [note for note in plan.notes if "compressing" in note]
    said = re.search(r"is predicted to spare ([\d.]+) ms a step; it was not asked for", note)
    named = set(re.findall(r"'(\w+)'", note))
    assert named <= {row.tag for row in plan.rows if not row.choice.action.names_codec}
    assert named
    # The room that a search learns of is its own, so that what each finds may differ.
    assert float(said[1]) > 0
    assert asked.predicted_seconds < plan.predicted_seconds
    assert not any("compressing" in note for note in asked.notes)
