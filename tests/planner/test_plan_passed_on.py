"""A `build` that does not give its plan to every block is refused, and so is a function that hides
a plan's policy.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.errors import StepError, TagError
from tests.shared import models, plans

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]
SHAPES = models.shapes()
FIXED = jaxmem.plans.Assignment({"block": {"up": "keep", "mask": "keep"}})
SOURCE = pathlib.Path(__file__)
narrow = functools.partial(models.scanned, block=models.narrow)
build = models.build_of(models.narrow)


def refused(builder) -> str:
    """The error's text, which comes before anything is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        never = lambda *_, **__: pytest.fail("a compile was asked for")
        patch.setattr("jaxmem._planner.search.compile.StepCompiler.try_compile_buffers", never)
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
        (lambda plan: build(FIXED), "of another plan than the given one (mask: keep, up: keep)"),
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


def wrapped_once(module, policy):
    """EasyDeL's `auto_remat`: replaces a class's `__call__` once, and keeps the first policy."""
    if getattr(module.__call__, "_auto_remat_wrapped", False):
        return module
    call = nnx.remat(f=module.__call__, prevent_cse=True, static_argnums=(), policy=policy)
    call._auto_remat_wrapped = True
    module.__call__ = call
    return module


@pytest.fixture
def library():
    """`build` of a step whose layers a library wraps by their class; the class; the arguments."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(jaxmem.tag(self.up(x), "up")))

    class Model(nnx.Module):
        def __init__(self, policy, rngs):
            layer = Layer if policy is None else wrapped_once(Layer, policy)
            self.layers = nnx.List([layer(rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def step_of(policy):
        graph, _ = nnx.split(Model(policy, nnx.Rngs(0)))

        def step(state, x):
            loss = lambda state: (nnx.merge(graph, state)(x) ** 2).mean()
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

        return step

    args = nnx.split(Model(None, nnx.Rngs(0)))[1], jnp.ones((4, 8))
    return step_of, Layer, args


@pytest.mark.parametrize(
    ("earlier", "cause"),
    [
        ((), "it is the first call's"),
        pytest.param(
            (None,),
            "it keeps everything, as remat_policy(None) does",
            marks=pytest.mark.todays_checkpoint,  # else JAX's policy, which is no block
        ),
        ((FIXED,), "it is of another plan than the given one (mask: keep, up: keep)"),
    ],
    ids=["fresh", "kept", "planned"],
)
def test_a_class_that_keeps_its_first_models_policy_is_named(library, earlier, cause):
    step_of, _, args = library
    for plan in earlier:
        step_of(jaxmem.remat_policy(plan))
    for call in (jaxmem.plan, functools.partial(jaxmem.verify, plans.plan(target="local"))):
        with pytest.raises(StepError, match="does not pass its plan on to every block") as caught:
            call(lambda plan: step_of(jaxmem.remat_policy(plan)), *args)
        text = str(caught.value)
        assert cause in text
        assert "blocks of label 'block'" in text
        lines = SOURCE.read_text().splitlines()
        assert f"{SOURCE.name}:{1 + lines.index('                x = layer(x)')}" in text
        assert "restore the class's own `__call__` in `build`" in text
        assert "plan jaxmem.auto(step)" in text


def assert_equal(got, want, before):
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, before)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        assert np.abs(b - c).max() > 1e-5, "the gradient is not zero"


def test_a_class_that_is_restored_for_each_model_is_planned(library):
    step_of, layer, args = library
    own = layer.__call__

    def build(plan):
        layer.__call__ = own
        return step_of(jaxmem.remat_policy(plan))

    assert jaxmem.plan(build, *args).keeps_everything
    recomputed = build(jaxmem.plans.Assignment({"block": {"up": "recompute"}}))(*args)
    layer.__call__ = own
    assert_equal(recomputed, step_of(None)(*args), args[0])
