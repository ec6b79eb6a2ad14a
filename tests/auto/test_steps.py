"""`jaxmem.auto` of whole training steps: what they differentiate is seen, however they name it, and
nothing else is changed: elsewhere, and afterwards, JAX is as it was.
"""

import contextlib
import functools
import gc
import sys
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import grad as gradient_by_another_name

import jaxmem
from jaxmem._model.auto.found_layers import found_layers
from jaxmem._trace.rewrite import Program
from jaxmem.errors import JaxmemWarning, StepError
from jaxmem.plans import Assignment
from tests.auto.steps import ARGS, LOSS, NOTHING, PARAMS, blocks_in, update
from tests.shared.compare import farthest, nearest
from tests.shared.foreign import flax_models
from tests.shared.foreign import plain as models
from tests.shared.foreign.size import SMALL, normal


def by_grad(params, batch):
    return update(params, jax.grad(LOSS)(params, batch)), 0.0


def by_value_and_grad(params, batch):
    value, gradients = jax.value_and_grad(LOSS)(params, batch)
    return update(params, gradients), value


def by_auxiliary_values(params, batch):
    more = lambda p: (LOSS(p, batch), {"tokens": batch.size})
    (value, _), gradients = jax.value_and_grad(more, has_aux=True)(params)
    return update(params, gradients), value


def by_jacrev(params, batch):
    both = lambda p: LOSS(p, batch) * jnp.asarray([0.25, 0.75])
    gradients = jax.jacrev(both)(params)
    return update(params, jax.tree.map(lambda g: g.sum(0), gradients)), both(params).sum()


def by_vjp(params, batch):
    value, pullback = jax.vjp(lambda p: LOSS(p, batch), params)
    return update(params, *pullback(jnp.ones_like(value))), value


def by_linearize(params, batch):
    value, derivative = jax.linearize(lambda p: LOSS(p, batch), params)
    return update(params, *jax.linear_transpose(derivative, params)(jnp.ones_like(value))), value


def by_an_imported_name(params, batch):
    return update(params, gradient_by_another_name(LOSS)(params, batch)), 0.0


def by_an_import_within(params, batch):
    from jax import value_and_grad as differentiated

    value, gradients = differentiated(LOSS)(params, batch)
    return update(params, gradients), value


def by_microbatches(params, batch):
    def one(total, rows):
        return jax.tree.map(jnp.add, total, jax.grad(LOSS)(params, rows)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(one, zeros, jnp.stack([batch, batch[::-1]]))
    return update(params, total), 0.0


def of_a_function_with_jit(params, batch):
    value, gradients = jax.jit(jax.value_and_grad(LOSS))(params, batch)
    return update(params, gradients), value


STEPS = [
    by_grad, by_value_and_grad, by_auxiliary_values, by_jacrev, by_vjp, by_linearize,
    by_an_imported_name, by_an_import_within, by_microbatches, of_a_function_with_jit,
]  # fmt: skip


@pytest.mark.quick("by_grad", "by_auxiliary_values", "by_jacrev", "by_vjp", "by_microbatches")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_differentiates_its_layers_as_blocks(step):
    planned = jaxmem.auto(step)(NOTHING)
    assert blocks_in(planned, PARAMS, *ARGS) > 0
    assert blocks_in(step, PARAMS, *ARGS) == 0, "the user's own step is not changed"
    assert blocks_in(jaxmem.auto(step, NOTHING), PARAMS, *ARGS) > 0
    assert jaxmem.auto(step)(None) is step
    assert jax.grad is gradient_by_another_name, "nothing stays replaced"


@functools.cache
def own_result():
    return jax.jit(by_value_and_grad)(PARAMS, *ARGS)


def test_the_result_is_the_steps_own():
    params, value = jax.jit(jaxmem.auto(by_value_and_grad, NOTHING))(PARAMS, *ARGS)
    assert farthest((params, value), own_result()) < 1e-13
    assert nearest(params, PARAMS) > 0, "every parameter has a gradient"


@pytest.mark.parametrize("step", [by_jacrev, by_linearize])
def test_gradients_by_other_functions_are_the_steps_own(step):
    params, value = jax.jit(jaxmem.auto(step, NOTHING))(PARAMS, *ARGS)
    assert farthest((params, value), own_result()) < 1e-13


def test_a_jitted_step_keeps_its_options_and_its_cache():
    traces = []

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="scale")
    def step(params, batch, scale=1.0):
        traces.append(scale)
        gradients = jax.grad(lambda p: scale * LOSS(p, batch))(params)
        return update(params, gradients)

    copy = lambda: jax.tree.map(jnp.copy, PARAMS)
    first = step(copy(), *ARGS, scale=2.0)
    planned = jaxmem.auto(step)(NOTHING)
    given = copy()
    second = planned(given, *ARGS, scale=2.0)
    assert farthest(first, second) < 1e-13
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "donated"
    assert traces == [2.0, 2.0], "what was traced before is not taken for the planned step"
    step(copy(), *ARGS, scale=2.0)
    planned(copy(), *ARGS, scale=2.0)
    assert len(traces) == 2, "neither is traced again"
    assert "differentiated=True" in str(planned.trace(PARAMS, *ARGS, scale=3.0).jaxpr)
    assert "differentiated=True" not in str(step.trace(PARAMS, *ARGS, scale=3.0).jaxpr)
    assert "tf.aliasing_output" in planned.lower(PARAMS, *ARGS, scale=3.0).as_text()
    again = jaxmem.auto(step, NOTHING)
    assert "differentiated=True" in str(again.trace(PARAMS, *ARGS, scale=3.0).jaxpr)
    assert "tf.aliasing_output" in again.lower(PARAMS, *ARGS, scale=3.0).as_text()


def test_an_nnx_step_is_planned():
    x = normal(0, 16, SMALL.width, scale=1.0).astype(jnp.float32)

    @nnx.jit
    def step(model, x):
        value, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, update(nnx.state(model, nnx.Param), gradients))
        return value

    results = []
    for run in (step, jaxmem.auto(step)(NOTHING), jaxmem.auto(step, NOTHING)):
        model = flax_models.NNXModel(nnx.Rngs(0))
        results.append((run(model, x), nnx.state(model, nnx.Param)))
    for other in results[1:]:
        for a, b in zip(*map(jax.tree.leaves, (other, results[0])), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    planned = jaxmem.auto(step)(NOTHING)
    stage = planned.trace(flax_models.NNXModel(nnx.Rngs(0)), x)
    assert "differentiated=True" in str(getattr(stage, "traced", stage).jaxpr)


def test_two_losses_have_labels_of_their_own_and_keep_them():
    other, params, _ = models.mixture_of_experts()

    def step(state, batch):
        first = jax.jit(jax.grad(LOSS))(state[0], batch)
        second = jax.jit(jax.grad(other))(state[1], batch)
        return update(state, (first, second))

    asked = []

    class Noted:
        def choices_for(self, block):
            asked.append(block)
            return {}

        def groups(self, block):
            return ()

    planned = jaxmem.auto(step, Noted())
    state = (PARAMS, params)
    for batch in (ARGS[0], ARGS[0][:1], ARGS[0]):
        jax.eval_shape(planned, state, batch)
    assert set(asked) == {"auto", "auto_2"}


def test_a_loss_that_holds_a_gradient_is_a_loss():
    """Of a function without layers: a gradient penalty, or a physics-informed network."""

    def loss(params, batch):
        scale = jax.grad(lambda s: (s**3).sum())(params["embedding"]).mean()
        return LOSS(params, batch) * (1 + scale)

    program = str(jax.make_jaxpr(jax.grad(jaxmem.auto(loss, NOTHING)))(PARAMS, *ARGS))
    assert "differentiated=True" in program


def test_a_step_whose_loss_has_no_layers_says_what_was_looked_at():
    step = lambda w, x: jax.grad(lambda w: (x @ w).sum())(w)
    with pytest.raises(StepError, match="no layer was found in '<lambda>' .it has no loop"):
        jaxmem.auto(step)(NOTHING)(normal(0, 4, 4), normal(1, 3, 4))
    with pytest.raises(StepError, match="called with dict where a plan was expected"):
        jax.grad(jaxmem.auto(LOSS))(PARAMS, *ARGS)


def test_a_plan_of_a_step_runs_it():
    plan = jaxmem.plan(jaxmem.auto(by_value_and_grad), PARAMS, *ARGS, budget="1GiB")
    assert plan.keeps_everything
    copy = jax.tree.map(jnp.copy, PARAMS)
    assert farthest(plan.step(copy, *ARGS), own_result()) < 1e-13


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


def nested(params, batch):
    def loss(params, batch):
        inner = jax.grad(LOSS)(params, batch)
        return LOSS(params, batch) + sum((g**2).sum() for g in jax.tree.leaves(inner))

    return update(params, jax.grad(loss)(params, batch))


def test_layers_of_targets_that_no_gradient_reaches_have_a_place_in_the_plan():
    """JAX computes the layers of targets as they are, and the trace has no block of them."""

    def network(weights, x):
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return x

    def step(params, x):
        def loss(params):
            target = jax.lax.stop_gradient(network(params[1], x[:4]))
            return jnp.sum((network(params[0], x)[:4] - target) ** 2)

        return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))

    weights = lambda key: list(jax.random.normal(jax.random.key(key), (4, 8, 8), jnp.float32) / 4)
    args = (weights(0), weights(1)), jnp.ones((16, 8), jnp.float32)
    plan = jaxmem.plan(jaxmem.auto(step), *args, actions=["recompute"])
    assert set(plan.actions) == {"auto", "auto_2"}
    kept = jaxmem.plans.Assignment({"auto": {}, "auto_2": {}})
    for got, want in zip(
        jax.tree.leaves(jaxmem.auto(step, kept)(*args)), jax.tree.leaves(step(*args))
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


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
