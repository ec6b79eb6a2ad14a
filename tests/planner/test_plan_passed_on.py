"""A `build` that does not give its plan to every block is refused, and so is a function that hides a
plan's policy.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import StepError, TagError
from tests.shared import models

pytestmark = [
    pytest.mark.core,
    pytest.mark.jax_defaults,
]
SHAPES = jax.eval_shape(
    lambda: (models.parameters(2, 16, jnp.float32), models.batch(2, 8, 16, jnp.float32))
)
FIXED = jaxmem.plans.Assignment({"block": {"up": "keep", "mask": "keep"}})
narrow = functools.partial(models.scanned, block=models.narrow)
build = models.build_with(narrow)


def refused(builder) -> str:
    """The error's text, which comes before anything is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        never = lambda *_, **__: pytest.fail("a compile was asked for")
        patch.setattr("jaxmem._planner.search.compile.StepCompiler.compile", never)
        patch.setattr("jaxmem._target.compile.backend.measure_all", never)
        with pytest.raises(StepError, match="does not pass its plan on") as caught:
            jaxmem.plan(builder, *SHAPES)
    return str(caught.value)


def cached_step():
    first = []

    def builder(plan):
        first.append(first[0] if first else build(plan))
        return first[-1]

    return builder


def jitted_with_a_global():
    used = [None]
    jitted = jax.jit(lambda p, x: build(used[0])(p, x), donate_argnums=0)

    def builder(plan):
        used[0] = plan
        return jitted

    return builder


def jitted_layer_with_a_global():
    used = [None]

    @jax.jit
    def layer(x, p, key):
        policy = jaxmem.remat_policy(used[0])
        return jax.checkpoint(models.narrow, policy=policy, prevent_cse=False)(x, p, key)

    def builder(plan):
        used[0] = plan
        # The step is made anew, and its policy stands in what the inner jit traced first.
        return models.build_with(lambda _: models.scanned(None, layer))(None)

    return builder


@pytest.mark.parametrize(
    ("builder", "cause"),
    [
        (lambda plan: build(None), r"it keeps everything, as remat_policy(None) does"),
        (lambda plan: build(FIXED), "it is of another plan (mask: keep, up: keep)"),
        (cached_step(), "it is the first call's"),
        (jitted_with_a_global(), "a jax.jit function made outside `build`"),
        (jitted_layer_with_a_global(), "which keeps what it traced first"),
    ],
    ids=["none", "another plan", "cached step", "cached jit", "cached inner jit"],
)
def test_a_plan_that_is_not_passed_on_is_an_error(builder, cause):
    assert cause in refused(builder)


def two_layers(first, second):
    def loss(p, x):
        layers = [jax.checkpoint(models.narrow, policy=q) for q in (first, second)]
        for i, layer in enumerate(layers):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], p), 0.0)
        return (x * x).mean()

    return lambda p, x: jax.tree.map(lambda w, g: w - g, p, jax.grad(loss)(p, x))


@pytest.mark.parametrize("label", ["block", "decoder"])
def test_a_plan_that_reaches_some_blocks_only_is_an_error(label):
    def builder(plan):
        return two_layers(jaxmem.remat_policy(plan), jaxmem.remat_policy(None, block=label))

    assert f"blocks of label {label!r} have the same policy" in refused(builder)


def test_a_block_that_is_not_to_be_planned_takes_no_policy_of_ours():
    def builder(plan):
        return two_layers(jaxmem.remat_policy(plan), jax.checkpoint_policies.nothing_saveable)

    assert jaxmem.plan(builder, *SHAPES).keeps_everything


def test_a_build_without_a_policy_for_none_is_planned():
    def builder(plan):
        return build(plan) if plan else models.build_with(lambda _: narrow(None))(None)

    assert jaxmem.plan(builder, *SHAPES).keeps_everything


def test_verify_refuses_such_a_build_too():
    plan = jaxmem.plan(build, *SHAPES)
    with pytest.raises(StepError, match="does not pass its plan on"):
        jaxmem.verify(plan, lambda plan: build(None), *SHAPES)


def either(ours, other):
    return lambda *args, **params: ours(*args, **params) or other(*args, **params)


@pytest.mark.parametrize(
    "combine",
    [
        either,
        lambda ours, other: functools.partial(lambda a, *args, **params: a(*args, **params), ours),
        lambda ours, other: (
            lambda *args, policies=(other, ours), **params: policies[1](*args, **params)
        ),
    ],
    ids=["by hand", "partial", "default"],
)
@pytest.mark.parametrize("call", [jaxmem.plan, jaxmem.explain], ids=["plan", "explain"])
def test_a_hidden_policy_is_named(combine, call):
    def builder(plan):
        other = jax.checkpoint_policies.dots_saveable
        return models.build_with(lambda _: narrow(combine(jaxmem.remat_policy(plan), other)))(None)

    with pytest.raises(TagError, match="a function that calls jaxmem.remat_policy.plan."):
        call(builder, *SHAPES)


def test_another_policy_is_no_block_of_ours():
    other = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable
    )
    with pytest.raises(StepError, match="the step has no block"):
        jaxmem.plan(models.build_with(lambda _: narrow(other)), *SHAPES)
