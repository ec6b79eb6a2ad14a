"""Pieces of a step are timed on arguments of their own kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._target.compile.timing import sample

pytestmark = pytest.mark.core


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_random_key_is_of_the_generator_that_the_step_was_given(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), (2, 3))
    found = sample(jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    assert (found.shape, found.dtype) == (keys.shape, keys.dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_numbers_are_ordinary(dtype):
    found = np.asarray(sample(jax.ShapeDtypeStruct((64, 64), dtype)), np.float32)
    assert np.isfinite(found).all()
    assert 0.8 < found.std() < 1.2


@pytest.mark.jax_defaults
def test_a_step_with_dropout_by_another_generator_is_planned():
    def layer(x, w, key):
        up = jaxmem.tag(x @ w, "up", kind="linear")
        kept = jaxmem.tag(jax.random.bernoulli(key, 0.5, up.shape), "kept", kind="mask")
        return x + jnp.where(kept, jnp.tanh(up), 0.0)

    def build(plan):
        block = jax.checkpoint(layer, policy=jaxmem.remat_policy(plan))

        def step(w, x, key):
            loss = lambda w: (block(x, w, key) ** 2).mean()
            return w - 0.1 * jax.grad(loss)(w)

        return step

    key = jax.random.key(0, impl="rbg")
    plan = jaxmem.plan(build, jnp.ones((64, 64)), jnp.ones((256, 64)), key)
    assert plan.compiled_bytes <= plan.budget_bytes
