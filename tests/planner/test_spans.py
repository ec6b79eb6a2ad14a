"""Plans of layers in spans: budgets below the least bytes of layers that are all saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import span_of
from tests.shared import models

TAGS = ("up", "mask", "act")
WIDTH = 64


def arguments(layers):
    return models.parameters(layers, WIDTH, jnp.float32), models.batch(8, 32, WIDTH)


def block(p, x):
    return models.narrow(x, p, None)


def build_stack(plan):
    """A step of `jaxmem.stack`."""

    def loss(w, x):
        return (jaxmem.stack(block, w, x, plan=plan) ** 2).mean()

    return functools.partial(step, loss)


def build_scan(plan):
    """A step of a scan over `jax.checkpoint`, which no policy can restructure."""
    layer = jax.checkpoint(block, policy=jaxmem.remat_policy(plan), prevent_cse=False)

    def loss(w, x):
        return (jax.lax.scan(lambda x, p: (layer(p, x), None), x, w)[0] ** 2).mean()

    return functools.partial(step, loss)


def step(loss, w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value


@functools.cache
def least(layers):
    """The compiled bytes of full recomputation, the least of layers that are all saved."""
    return jaxmem.plans.price(build_stack, Assignment.nothing(), *arguments(layers)).compiled_bytes


def spans(plan):
    return [span_of(label) for label in plan.actions]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("layers", [36, pytest.param(31, marks=pytest.mark.slow)])
def test_a_budget_below_the_least_of_saved_layers_is_met(layers):
    budget = int(0.9 * least(layers))
    args = arguments(layers)
    plan = jaxmem.plan(build_stack, *args, budget=budget, actions=jaxmem.plans.LOSSLESS)
    (span,) = spans(plan)
    assert 1 < span < layers
    assert plan.compiled_bytes <= budget
    assert abs(plan.compiled_bytes - plan.predicted_bytes) <= 0.03 * plan.compiled_bytes
    assert any(f"in spans of {span}" in note for note in plan.notes)
    assert f"block[0:{layers}:{span}]" in str(plan)
    # The planned step computes what the step without a plan computes.
    want = jax.jit(build_stack(None))(*args)
    got = plan.step(*args)  # which takes its first argument
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_a_loop_that_runs_no_spans_has_no_plan_of_them():
    with pytest.raises(jaxmem.errors.BudgetError, match="the least that compiled is"):
        jaxmem.plan(
            build_scan, *arguments(36), budget=int(0.9 * least(36)), actions=jaxmem.plans.LOSSLESS
        )
    plan = Assignment({"block[0:36:6]": {}})
    with pytest.raises(
        jaxmem.errors.TagError,
        match="block 'block' cannot be divided|runs no spans|one policy cannot",
    ):
        jaxmem.plans.price(build_scan, plan, *arguments(36))


def test_a_budget_below_the_least_in_spans_names_it():
    with pytest.raises(jaxmem.errors.BudgetError) as caught:
        jaxmem.plan(
            build_stack, *arguments(36), budget=int(0.6 * least(36)), actions=jaxmem.plans.LOSSLESS
        )
    assert caught.value.least_bytes < 0.9 * least(36)
    plan = jaxmem.plan(
        build_stack, *arguments(36), budget=caught.value.least_bytes, actions=jaxmem.plans.LOSSLESS
    )
    assert plan.compiled_bytes <= caught.value.least_bytes


def test_a_price_in_spans_names_compiled_bytes():
    label = "block[0:36:6]"
    plan = jaxmem.plans.price(
        build_stack, Assignment({label: models.actions("keep", TAGS)}), *arguments(36)
    )
    assert plan.groups("block") == ((0, 36, 6),)
    one = arguments(36)[1].nbytes
    # Six inputs of spans; and of six layers the input, two tensors of twice its bytes, and a mask.
    assert plan.parts.saved == 6 * one + 6 * (one + 4 * one + one // 2)
    estimated = jaxmem.plans.estimate(build_stack, plan, *arguments(36))
    assert estimated.saved_bytes == plan.parts.saved
    assert abs(estimated.bytes - plan.compiled_bytes) <= 0.05 * plan.compiled_bytes
    # The second forward of all layers is slower than what it saves of memory traffic.
    kept = jaxmem.plans.estimate(build_stack, models.draft("keep", TAGS), *arguments(36))
    assert estimated.seconds_more > kept.seconds_more


def test_a_saved_plan_in_spans_is_read_again(tmp_path):
    plan = jaxmem.plans.price(build_stack, Assignment({"block[0:6:3]": {}}), *arguments(6))
    plan.save(tmp_path / "plan.json")
    loaded = jaxmem.Plan.load(tmp_path / "plan.json")
    assert loaded.groups("block") == ((0, 6, 3),)
    assert jaxmem.verify(loaded, build_stack, *arguments(6)).compiled_bytes == plan.compiled_bytes
