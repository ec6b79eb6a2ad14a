"""`jaxmem.auto` with layers in spans: scans of scans, and checkpoints around several layers of a
Python loop, have the gradients of the loss.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import span_of
from jaxmem._model.auto.step import planned_step
from jaxmem._model.tags.policy import decisions
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


def unrolled(p, x):
    """The loss of the same layers in a Python loop, with parameters of their own."""
    keys = jax.random.split(jax.random.key(3), len(p))
    carried, aux = (x, x[0] * 2), []
    for each in zip(p, keys):
        carried, of_layer = layer(carried, each)
        aux.append(of_layer)
    a, b = carried
    return (a * a).mean() + (b**3).sum() + jnp.stack(aux) @ jnp.arange(1.0, 1.0 + len(p))


def apart():
    """The arguments, with the parameters of each layer in a tree of their own."""
    p, x = arguments()
    return [jax.tree.map(lambda a, i=i: a[i], p) for i in range(LAYERS)], x


@pytest.mark.quick("keep-3", "recompute-2")
@pytest.mark.parametrize("span", [2, 3, 4])
@pytest.mark.parametrize("action", ["keep", "recompute", "everything"])
def test_gradients_of_a_python_loop_in_spans(action, span):
    plan = Assignment({f"auto[0:{LAYERS}:{span}]": choices(action, LAYERS)})
    got = jax.jit(jax.value_and_grad(jaxmem.auto(unrolled, plan), (0, 1)))(*apart())
    value, (p, x) = expected()
    close(got, (value, ([jax.tree.map(lambda a, i=i: a[i], p) for i in range(LAYERS)], x)))


@pytest.mark.parametrize(
    ("label", "again"), [("auto", 0), (f"auto[0:{LAYERS}:3]", 4), ("auto[0:3]", 0), ("both", 2)]
)
def test_layers_of_a_span_of_a_python_loop_run_forward_once_more(label, again):
    """All but the last layer of a span: nothing reads the result of its second forward."""
    plans = {
        "auto[0:3]": {"auto[0:3]": {}, f"auto[3:{LAYERS}]": {}},
        "both": {"auto[0:2]": {}, f"auto[2:{LAYERS}:2]": {}},  # five layers: two spans and a layer
    }
    function = jaxmem.auto(unrolled, Assignment(plans.get(label, {label: {}})))
    jaxpr = jax.make_jaxpr(jax.grad(function))(*apart())
    assert runs(jaxpr.jaxpr, "exp") == 2 * LAYERS + again


def deep(p, x):
    x = x * p[0]["up"][0, 0]
    for own in p:
        x = x + jnp.tanh(x @ own["up"]) @ own["down"]
    return (x**2).mean()


def deep_step(p, x):
    value, gradient = jax.value_and_grad(deep)(p, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradient), value


@pytest.mark.filterwarnings("ignore:jaxmem. offload is left out")  # loops alone offload
@pytest.mark.usefixtures("h200")
def test_a_python_loop_fits_a_budget_below_the_least_of_saved_layers():
    """Compiled for an H200: XLA:CPU of jaxlib 0.10 undoes checkpoints in a Python loop."""
    stacked = models.parameters(24, 64, jnp.float32)
    p = [{k: stacked[k][i] for k in ("up", "down")} for i in range(24)]
    args = p, models.batch(64, 32, 64)
    auto = jaxmem.auto(deep_step)
    price = functools.partial(jaxmem.plans.price, auto, target="h200")
    least = price(Assignment.nothing(), *args).compiled_bytes
    budget, actions = int(0.75 * least), ("keep", "recompute")
    plan = jaxmem.plan(auto, *args, budget=budget, target="h200", actions=actions)
    (span,) = map(span_of, plan.actions)
    assert span > 1
    assert plan.compiled_bytes <= budget
    assert abs(plan.compiled_bytes - plan.predicted_bytes) <= 0.06 * plan.compiled_bytes
    got, want = jax.jit(auto(plan))(*args), jax.jit(deep_step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), got[0], p)
    assert all(jax.tree.leaves(moved))


def test_layers_with_loops_between_them_run_no_spans():
    """No checkpoint could hold several of them alone."""

    def separated(p, x):
        for turns, own in enumerate(p[:4], 2):
            x = x + jnp.tanh(x @ own["up"]) @ own["down"]
            x = jax.lax.fori_loop(0, turns, lambda _, x, own=own: jnp.sin(x @ own["a"]), x)
        return (x * x).mean()

    args = apart()
    layers: list = []
    gradients = lambda *args: jax.grad(separated)(*args)
    jax.make_jaxpr(planned_step(gradients, decisions(Assignment.nothing()), layers))(*args)
    counts = collections.Counter(layer.label for layer in layers)
    label, count = max(counts.items(), key=lambda item: item[1])
    assert count >= 3
    with pytest.raises(jaxmem.errors.TagError, match=r"in spans of 2 layers, and only"):
        jax.grad(jaxmem.auto(separated, Assignment({f"{label}[0:{count}:2]": {}})))(*args)
