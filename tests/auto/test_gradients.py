"""Which gradients of a step are seen; elsewhere, and afterwards, JAX is as it was."""

import contextlib
import functools
import sys
import threading
import types

import jax
import pytest

import jaxmem
from jaxmem._model.auto.found_layers import found_layers
from jaxmem.errors import JaxmemWarning, StepError
from tests.auto.steps import ARGS, LOSS, NOTHING, PARAMS, blocks_in, farthest, update

pytestmark = pytest.mark.standard_promotion


def nested(params, batch):
    def loss(params, batch):
        inner = jax.grad(LOSS)(params, batch)
        return LOSS(params, batch) + sum((g**2).sum() for g in jax.tree.leaves(inner))

    return update(params, jax.grad(loss)(params, batch))


def test_of_nested_gradients_the_outermost_is_planned():
    """Its loss holds three loops over layers: its own, and the inner gradient's two."""
    planned = jaxmem.auto(nested)(NOTHING)
    assert blocks_in(planned, PARAMS, *ARGS) > 0
    assert len(found_layers(nested, (PARAMS, *ARGS))) == 3, "the inner gradient is none of its own"


@pytest.mark.slow
def test_nested_gradients_are_the_steps_own():
    got, want = jax.jit(jaxmem.auto(nested)(NOTHING))(PARAMS, *ARGS), jax.jit(nested)(PARAMS, *ARGS)
    assert farthest(got, want) < 1e-10


GRADIENT = jax.value_and_grad(LOSS)


def helper(params, batch):
    return GRADIENT(params, batch)


def with_a_gradient_made_before(params, batch):
    value, gradients = helper(params, batch)
    return update(params, gradients), value


def test_a_gradient_that_was_made_before_is_named():
    with pytest.raises(StepError, match=r"GRADIENT \(of loss, .*plain.py:\d+\)"):
        jaxmem.plan(jaxmem.auto(with_a_gradient_made_before), PARAMS, *ARGS)
    made = jax.grad(LOSS)
    with pytest.raises(StepError, match=r"it uses made \(of loss"):
        jaxmem.auto(lambda params, batch: made(params, batch))(NOTHING)(PARAMS, *ARGS)
    partial = functools.partial(jax.grad, has_aux=False)
    with pytest.raises(StepError, match=r"it uses partial \(a partial of jax.grad\)"):
        jaxmem.auto(lambda params, batch: partial(LOSS)(params, batch))(NOTHING)(PARAMS, *ARGS)
    with pytest.raises(StepError, match="called none of jax.grad"):
        jaxmem.auto(lambda params, batch: params)(NOTHING)(PARAMS, *ARGS)
    with pytest.raises(StepError, match=r"GRADIENT \(of loss"):
        jaxmem.auto(with_a_gradient_made_before, NOTHING)(PARAMS, *ARGS)  # not taken for a loss
    hidden = {"grad": jax.grad}
    with pytest.raises(StepError, match="called none of jax.grad"):
        jaxmem.auto(lambda p, b: hidden["grad"](LOSS)(p, b), NOTHING)(PARAMS, *ARGS)


def test_a_step_taken_for_a_loss_is_told():
    loss_first = lambda params, batch: with_a_gradient_made_before(params, batch)[::-1]
    told = pytest.warns(JaxmemWarning, match=r"taken for a loss, and uses GRADIENT \(of loss")
    with told, contextlib.suppress(StepError):
        jaxmem.auto(loss_first, NOTHING)(PARAMS, *ARGS)


def own_step(params, batch):
    return update(params, jax.grad(LOSS)(params, batch))


def test_other_threads_are_not_seen():
    """One thread is in the middle of tracing its planned step while another takes gradients."""
    inside, done = threading.Event(), threading.Event()
    elsewhere = []

    def loss(params, batch):
        inside.set()
        assert done.wait(60)
        return LOSS(params, batch)

    def other():
        assert inside.wait(60)
        elsewhere.append(blocks_in(own_step, PARAMS, *ARGS))
        done.set()

    def step(params, batch):
        return update(params, jax.grad(loss)(params, batch))

    thread = threading.Thread(target=other)
    thread.start()
    assert blocks_in(jaxmem.auto(step)(NOTHING), PARAMS, *ARGS) > 0
    thread.join()
    assert elsewhere == [0]


def test_nothing_stays_replaced():
    """Neither after an error, nor in a module that was imported while a step was traced."""
    before = jax.grad, jax.value_and_grad, jax.vjp
    late = types.ModuleType("imported_late")

    def step(params, batch):
        exec("from jax import grad, value_and_grad, vjp", vars(late))
        sys.modules["imported_late"] = late
        raise RuntimeError("of the user's own")

    try:
        with pytest.raises(RuntimeError, match="of the user's own"):
            jaxmem.auto(step)(NOTHING)(PARAMS, *ARGS)
    finally:
        sys.modules.pop("imported_late", None)
    assert (jax.grad, jax.value_and_grad, jax.vjp) == before
    assert (late.grad, late.value_and_grad, late.vjp) == before
