"""Released steps of losses whose layers are unlike each other: values and states are the plain
step's, with places of states, under plans, and with frozen parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.errors import NoLayersError
from jaxmem.plans import Assignment
from tests.shared.compare import farthest
from tests.shared.foreign.unlike import chain, loss_of_couplings, unet

NEAR = 1e-6
MODELS = {"a chain": chain, "a U-Net": unet}
# The U-Net has two pairs of equal blocks, which are its layers.
LAYERS = {"a chain": 9, "a U-Net": 4}


def plain(tx, loss):
    def step(state, batch):
        params, old = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, new = tx.update(gradients, old, params)
        return (optax.apply_updates(params, updates), new), value

    return jax.jit(step)


def near(got, want) -> bool:
    every = [np.asarray(a) for a in jax.tree.leaves(want)]
    assert all(a.any() for a in every if a.ndim)
    return farthest(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want)) < NEAR


@pytest.mark.quick("as it is-a chain", "recomputed-a chain", "as it is-a U-Net")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", [None, Assignment.nothing()], ids=["as it is", "recomputed"])
def test_values_and_states_are_the_plain_steps(model, plan):
    loss, params, batch = MODELS[model]()
    tx = optax.adamw(1e-3)
    released = jaxmem.released_step(tx, loss, plan=plan)
    state, expected = released.init(params, batch), (params, tx.init(params))
    for _ in range(2):
        state, metrics = jax.jit(released)(state, batch)
        expected, value = plain(tx, loss)(expected, batch)
    assert near((state, metrics["loss"]), (expected, value))
    if plan is None:
        assert len(metrics["skipped_layers"]) == LAYERS[model]


def test_adama_accumulates_microbatches():
    loss, params, x = chain()
    tx = jaxmem.adama(1e-3, accumulation_steps=2)
    released = jaxmem.released_step(tx, loss)
    state, _ = jax.jit(released)(released.init(params, x), x)
    gradients = [jax.grad(loss)(params, half) for half in (x[:32], x[32:])]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *gradients)
    assert near(state[1].mu, jax.tree.map(lambda g: 0.1 * g, mean))


@pytest.mark.parametrize("persist", [0, 4])
def test_layers_have_places(persist):
    loss, params, x = chain()
    tx = optax.adam(1e-3)
    released = jaxmem.released_step(tx, loss)
    state = jax.tree.map(jnp.copy, released.init(params, x))
    want, _ = jax.jit(released)(state, x)
    bound = released.of(params, x)
    split = bound.split(state, persist)
    kinds = [a.sharding.memory_kind for a, _ in split[0]]
    assert kinds == ["device"] * persist + ["pinned_host"] * (9 - persist)
    got, _ = jax.jit(released)(split, x)
    assert near(bound.joined(got), want)


def test_frozen_parameters_are_not_trained():
    loss, params, x = chain()
    tx, is_trained = optax.adam(1e-3), [(i > 2, i > 2) for i in range(9)]
    released = jaxmem.released_step(tx, loss, trainable=lambda params: is_trained)
    state, _ = jax.jit(released)(released.init(params, x), x)
    gradients = jax.grad(loss)(params, x)[3:]
    updates, _ = tx.update(gradients, tx.init(params[3:]))
    assert near(state[0], [*params[:3], *optax.apply_updates(params[3:], updates)])


def test_a_single_product_is_no_layer():
    loss = lambda params, x: ((x @ params) ** 2).mean()
    with pytest.raises(NoLayersError):
        jaxmem.released_step(optax.sgd(1e-2), loss).init(jnp.ones((3, 2)), jnp.ones((4, 3)))


@pytest.mark.jax_defaults
def test_a_plan_says_nothing_of_tags_that_the_user_did_not_write():
    """A warning is an error here: the sum over layers has a tag, and no backward reads it."""
    loss, shape = loss_of_couplings(lambda layer: layer), jax.ShapeDtypeStruct
    sizes = {"in": (8, 128), "out": (128, 16)}
    params = [{name: shape(size, jnp.float32) for name, size in sizes.items()}] * 3
    x = shape((64, 16), jnp.float32)
    build = lambda plan: jaxmem.released_step(jaxmem.adama(1e-3), loss, plan=plan)
    state = jax.eval_shape(build(None).init, params, x)
    assert set(jaxmem.plan(build, state, x, budget="1GiB").actions) == {"auto"}
