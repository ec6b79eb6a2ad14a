"""`jaxmem.auto(step, plan)`: a step that is called under a plan that was written by hand."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.plans import Assignment
from tests.shared.foreign import plain as models

pytestmark = [pytest.mark.standard_promotion, pytest.mark.usefixtures("quick_compiles")]

NOTHING = Assignment.nothing()
LOSS, PARAMS, ARGS = models.gemma_in_a_scan()


def update(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def farthest(got, want) -> float:
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def test_a_step_that_is_run_has_the_labels_of_its_plan():
    """Whatever its trial trace looks like: a step may do more while it is traced than when run."""
    groups = Assignment({"auto": {}})

    def step(params, batch):
        def loss(p):
            traced = isinstance(batch, jax.core.Tracer)
            return LOSS(p, batch) * (jnp.cos(0.0) if traced else 1.0)

        return update(params, jax.grad(loss)(params)), 0.0

    for _ in range(2):
        got, _ = jaxmem.auto(step, groups)(PARAMS, *ARGS)
    assert farthest(got, step(PARAMS, *ARGS)[0]) < 1e-13


def test_static_arguments_may_be_numbers_of_numpy():
    step = jax.jit(
        lambda p, batch, n: update(p, jax.grad(lambda p: int(n) * LOSS(p, batch))(p)),
        static_argnums=2,
    )
    got = jaxmem.auto(step, NOTHING)(PARAMS, *ARGS, np.int32(2))
    assert farthest(got, step(PARAMS, *ARGS, np.int32(2))) < 1e-13


def test_caches_of_jit_do_not_hold_a_planned_step():
    """What was found in it, arrays among that, would stay for as long as the user's function."""
    inner = jax.jit(own_gradients)
    planned = jaxmem.auto(lambda params, batch: update(params, inner(params, batch)))(NOTHING)
    jax.eval_shape(planned, PARAMS, *ARGS)
    layers = [weakref.ref(layer) for layer in planned.layers]
    assert layers
    del planned
    gc.collect()
    assert not any(layer() for layer in layers)


def own_gradients(params, batch):
    return jax.grad(LOSS)(params, batch)
