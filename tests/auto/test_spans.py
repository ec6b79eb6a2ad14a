"""`jaxmem.auto` with layers in spans: scans of scans have the gradients of the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import span_of
from tests.shared import models
from tests.shared.executed import runs

LAYERS, WIDTH = 7, 16


def layer(x, own):
    """A layer with dropout by a key, a carry of two leaves and a stacked output."""
    p, key = own
    a, b = x
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", a @ p["a"], a))
    a = a + jnp.einsum("bst,btd->bsd", scores, models.norm(a))
    drop = jax.random.bernoulli(key, 0.8, a.shape)
    up = jax.nn.gelu(models.norm(a) @ p["up"])
    a = a + jnp.where(drop, up @ p["down"], jnp.zeros((), a.dtype))
    b = jnp.tanh(b + a.mean(0))
    return (a, b), (up * up).mean()


def loss(p, x, reverse=False):
    keys = jax.random.split(jax.random.key(3), p["a"].shape[0])
    start = x, x[0] * 2
    (a, b), aux = jax.lax.scan(layer, start, (p, keys), reverse=reverse)
    return (a * a).mean() + (b**3).sum() + aux @ jnp.arange(1.0, 1.0 + aux.shape[0])


def arguments(layers=LAYERS):
    return models.parameters(layers, WIDTH, jnp.float64), models.batch(2, 8, WIDTH, jnp.float64)


def choices(action, layers):
    """Choices for the tags that `auto` finds: all of them with one action."""
    if action == "everything":
        return {UNTAGGED: KEEP}
    names = found(layers)
    return dict.fromkeys(names, action) if action != "recompute" else {}


@functools.cache
def found(layers):
    plan = jaxmem.plans.price(build, Assignment.nothing(), *arguments(layers))
    return [row.tag for row in plan.rows]


def build(plan):
    return jaxmem.auto(step)(plan) if plan is not None else step


def step(p, x):
    value, gradient = jax.value_and_grad(loss)(p, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradient), value


@functools.cache
def expected(layers=LAYERS, reverse=False):
    gradients = jax.jit(jax.value_and_grad(functools.partial(loss, reverse=reverse), (0, 1)))
    want = gradients(*arguments(layers))
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(want[1]))
    return want


def close(got, want):
    """Compares each leaf within 1e-12 of its largest element: softmax is tagged inside its rule, so
    that sums are rounded otherwise than in the loss as it is.
    """

    def one(g, w):
        np.testing.assert_allclose(g, w, rtol=1e-12, atol=1e-12 * float(jnp.abs(w).max()))

    jax.tree.map(one, got, want)


@pytest.mark.quick("keep-3", "recompute-2")
@pytest.mark.parametrize("span", [2, 3, 4])
@pytest.mark.parametrize("action", ["keep", "recompute", "everything"])
def test_gradients_are_those_of_the_loss(action, span):
    plan = Assignment({f"auto[0:{LAYERS}:{span}]": choices(action, LAYERS)})
    got = jax.jit(jax.value_and_grad(jaxmem.auto(loss, plan), (0, 1)))(*arguments())
    close(got, expected())


def test_a_scan_that_runs_backward():
    plan = Assignment({f"auto[0:{LAYERS}:3]": {}})
    function = jaxmem.auto(functools.partial(loss, reverse=True), plan)
    close(jax.jit(jax.value_and_grad(function, (0, 1)))(*arguments()), expected(reverse=True))


@pytest.mark.parametrize(("span", "times"), [(1, 2 * LAYERS), (3, 2 * LAYERS + 6)])
def test_each_layer_of_a_span_runs_forward_once_more(span, times):
    """Only the softmax has an exponential, and only its forward: one for each run of a layer."""
    label = "auto" if span == 1 else f"auto[0:{LAYERS}:{span}]"
    function = jaxmem.auto(loss, Assignment({label: {}}))
    jaxpr = jax.make_jaxpr(jax.grad(function))(*arguments())
    assert runs(jaxpr.jaxpr, "exp") == times


def narrow(p, x):
    body = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)
    return (jax.lax.scan(body, x, p)[0] ** 2).mean()


def narrow_step(p, x):
    value, gradient = jax.value_and_grad(narrow)(p, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradient), value


def test_a_budget_below_the_least_of_saved_layers_is_met():
    args = models.parameters(36, 64, jnp.float32), models.batch(8, 32, 64)
    auto = jaxmem.auto(narrow_step)
    least = jaxmem.plans.price(auto, Assignment.nothing(), *args).compiled_bytes
    plan = jaxmem.plan(auto, *args, budget=int(0.9 * least), actions=jaxmem.plans.LOSSLESS)
    (span,) = map(span_of, plan.actions)
    assert span > 1
    assert plan.compiled_bytes <= 0.9 * least
    assert abs(plan.compiled_bytes - plan.predicted_bytes) <= 0.03 * plan.compiled_bytes
    want = jax.jit(narrow_step)(*args)
    got = plan.step(*args)  # which takes its first argument
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_layers_of_a_python_loop_run_no_spans():
    def unrolled(p, x):
        for i in range(3):
            x = x + jnp.tanh(models.norm(x) @ p["a"][i])
        return (x * x).mean()

    with pytest.raises(jaxmem.errors.TagError, match="in spans of 2 layers, and only"):
        jax.grad(jaxmem.auto(unrolled, Assignment({"auto[0:3:2]": {}})))(*arguments(3))
