"""`jaxmem.auto(step, plan)`: a step that is called under a plan that was written by hand."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._trace.rewrite import Program
from jaxmem.plans import Assignment
from tests.auto.steps import ARGS, LOSS, NOTHING, PARAMS, blocks_in, farthest, update

pytestmark = pytest.mark.standard_promotion


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
    """What it is made of, arrays among that, would stay for as long as the user's function."""
    inner = jax.jit(own_gradients)
    planned = jaxmem.auto(lambda params, batch: update(params, inner(params, batch)))(NOTHING)
    assert blocks_in(planned, PARAMS, *ARGS) > 0
    held = weakref.ref(planned)
    del planned
    gc.collect()
    assert held() is None


def test_a_loop_of_calls_keeps_no_programs():
    """Each call traces the loss anew; what it was traced to goes when the call is over."""
    planned = jaxmem.auto(LOSS, NOTHING)
    programs = lambda: sum(isinstance(x, Program) for x in gc.get_objects())
    counts = []
    for _ in range(3):
        jax.eval_shape(planned, PARAMS, *ARGS)
        gc.collect()
        counts.append(programs())
    assert counts[0] == counts[1] == counts[2]


def own_gradients(params, batch):
    return jax.grad(LOSS)(params, batch)
