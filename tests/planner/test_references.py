"""Plans of steps that hold a `jax.Ref`: gradients that are accumulated in references, and layers
that read, write or make one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import JaxmemWarning, NoLayersError
from tests.shared.compare import close

pytestmark = pytest.mark.core
LAYERS, BATCH, WIDTH = 4, 64, 16


def layer(x, w):
    up = jaxmem.tag(x @ w["up"], "up")
    return x + jaxmem.tag(jnp.sin(up) * up, "act") @ w["down"]


def loss_of(plan, body=layer):
    """The loss, with the layers in a scan; without checkpoints if `plan` is False."""
    if plan is not False:
        body = jax.checkpoint(body, policy=jaxmem.remat_policy(plan), prevent_cse=False)
    return lambda w, x: (jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0] ** 2).mean()


def accumulating(plan, in_a_loop):
    """Two microbatches' gradients, added in references."""
    loss = loss_of(plan)

    def step(w, x):
        sums = jax.tree.map(lambda a: jax.new_ref(jnp.zeros_like(a)), w)

        def add(_, x):
            value, pullback = jax.vjp(lambda w: loss(w, x), w)
            pullback.with_refs(sums)(jnp.ones_like(value))
            return None, value

        if in_a_loop:
            jax.lax.scan(add, None, x.reshape(2, -1, WIDTH))
        else:
            for half in jnp.split(x, 2):
                add(None, half)
        return jax.tree.map(jax.freeze, sums)

    return step


def reading(plan):
    def step(w, x):
        scale = jax.new_ref(jnp.full((), 0.5))
        return jax.grad(loss_of(plan, lambda x, w: layer(scale[...] * x, w)))(w, x)

    return step


def making(plan):
    def body(x, w):
        inner = jax.new_ref(0 * x)
        inner[...] += x
        return layer(inner[...], w)

    return lambda w, x: jax.grad(loss_of(plan, body))(w, x)


def counting(plan, kind="no_grad_no_remat"):
    def step(w, x):
        count = jax.new_ref(jnp.zeros(()), kind=kind)

        def body(x, w):
            count[...] += 1
            return layer(x, w)

        return jax.grad(loss_of(plan, body))(w, x), jax.freeze(count)

    return step


STEPS = {
    "gradients in references": functools.partial(accumulating, in_a_loop=False),
    "gradients in references, in a loop": functools.partial(accumulating, in_a_loop=True),
    "a layer reads": reading,
    "a layer makes": making,
    "a layer counts": counting,
}


def arguments():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4)
    w = {"up": make(LAYERS, WIDTH, 4 * WIDTH), "down": make(LAYERS, 4 * WIDTH, WIDTH)}
    return w, make(BATCH, WIDTH)


@pytest.mark.parametrize("build", STEPS.values(), ids=STEPS)
def test_a_step_is_planned_within_its_budget(build):
    w, x = arguments()
    plan = functools.partial(jaxmem.plan, build, w, x, actions="lossless")
    whole = plan(budget="1GiB")
    least = plan(budget=int(0.85 * whole.baseline_bytes))
    assert least.compiled_bytes <= 0.85 * whole.baseline_bytes
    assert {row.tag for row in least.rows} == {"up", "act"}
    want = jax.jit(build(False))(w, x)
    close(least.step(jax.tree.map(jnp.copy, w), x), want, 1e-12)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(want))


@pytest.mark.parametrize("name", STEPS)
def test_auto_plans_what_holds_no_reference_in_its_layers(name):
    w, x = arguments()
    step = STEPS[name](False)
    plan = functools.partial(jaxmem.plan, jaxmem.auto(step), w, x, actions="lossless")
    if name.startswith("a layer"):
        with pytest.raises(NoLayersError, match=r"make a jax\.Ref, which no block"):
            plan(budget="1GiB")
        return
    budget = int(0.85 * plan(budget="1GiB").baseline_bytes)
    least = plan(budget=budget)
    assert least.compiled_bytes <= budget
    close(least.step(jax.tree.map(jnp.copy, w), x), jax.jit(step)(w, x), 1e-12)


def test_a_write_that_the_backward_repeats_is_warned_of():
    build = functools.partial(counting, kind=None)
    with pytest.warns(JaxmemWarning, match=r"writes a jax\.Ref .* kind='no_grad_no_remat'"):
        jaxmem.plan(build, *arguments(), budget="1GiB")
