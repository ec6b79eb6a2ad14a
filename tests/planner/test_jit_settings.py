"""Calls of `jaxmem.jit` for which `jax.jit` traces again, although all shapes are equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem

pytestmark = [
    pytest.mark.core,
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore:jit. the step runs as it is"),
]


def step(weights, rate):
    noise = jax.random.normal(jax.random.key(0), weights.shape, weights.dtype)
    gradient = jax.grad(lambda w: jnp.sum((w @ w) ** 2))(weights)
    return weights - rate * gradient, noise, jnp.arange(3)


def called(*calls):
    """Compares results of calls with results of `jax.jit`; a call is a context and a rate."""
    weights = jnp.full((4, 4), 0.5, jnp.bfloat16)
    ours, plain = jaxmem.jit(step), jax.jit(step)
    types = set()
    for context, rate in calls:
        with context:
            got, want = ours(weights, rate), plain(weights, rate)
        for a, b in zip(got, want, strict=True):
            assert (a.dtype, a.aval.weak_type) == (b.dtype, b.aval.weak_type)
            np.testing.assert_array_equal(a, b)
        types.add(str([(a.dtype, a) for a in want]))
    return types


def standard():
    """JAX's own rules of promotion; the tests have stricter ones."""
    return jax.numpy_dtype_promotion("standard")


@pytest.mark.parametrize(
    "rates",
    [
        (0.1, jnp.float32(0.1), np.float32(0.1), 0.2),
        (jnp.float32(0.1), 0.1, jnp.asarray(0.1)),
    ],
    ids=["number first", "array first"],
)
def test_a_number_and_an_array_of_one_value_are_different(rates):
    assert len(called(*((standard(), rate) for rate in rates))) > 1


def test_without_jit_the_step_runs_operation_by_operation():
    seen = []

    def watched(weights, rate):
        seen.append(isinstance(weights, jax.core.Tracer))
        return step(weights, rate)

    weights = jnp.full((4, 4), 0.5, jnp.float32)
    for calls_before in (0, 1):
        made = jaxmem.jit(watched)
        want = [made(weights, 0.1) for _ in range(calls_before)]
        seen.clear()
        with jax.disable_jit():
            got = made(weights, 0.1)
        assert not seen[-1]
        for result in want:
            np.testing.assert_allclose(got[0], result[0], rtol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        lambda: jax.enable_x64(False),
        lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    ],
    ids=["dtypes", "random numbers"],
)
def test_settings_of_jax_are_those_of_the_call(other):
    plain = jax.numpy_rank_promotion("allow")
    assert len(called((plain, 0.1), (other(), 0.1), (plain, 0.1))) == 2
