"""Scales are rounded up, and stochastic rounding is unbiased and repeats itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_kernels as jk
from jaxmem_kernels import rounding

pytestmark = pytest.mark.core


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_a_scale_is_the_least_number_not_below(wide, dtype):
    exact = np.exp(np.random.default_rng(0).uniform(-80, 80, 500)).astype(wide)
    exact = np.concatenate([exact, np.array([1, 1.0078125, 2.0**-126, 2.0**127], wide)])

    def both(s):  # in one program, where XLA may drop pairs of conversions
        up = jk.round_up(s, dtype)
        return up, up.astype(s.dtype) >= s

    up, covers = jax.jit(both)(exact)
    assert up.dtype == dtype
    assert covers.all()
    up = np.asarray(up, np.float64)
    assert (up >= exact).all()
    assert (up - exact < exact * float(jnp.finfo(dtype).eps)).all()
    assert (up[-4:] == exact[-4:]).all()


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize(
    ("exact", "want"), [(0, 0), (1e-42, 0), (3.4e38, np.nan), (np.inf, np.nan), (np.nan, np.nan), (2.0**-127, 0)]
)
def test_a_scale_without_a_bfloat16_is_zero_or_nan(exact, want, wide):
    np.testing.assert_array_equal(jk.round_up(jnp.asarray(exact, wide), jnp.bfloat16).astype(wide), want)


def test_uniform_is_uniform_and_depends_on_row_and_place():
    x = jax.random.normal(jax.random.key(0), (512, 2, 32), jnp.float32)
    uniform = jax.jit(rounding.uniform)
    u = np.asarray(uniform(x))
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, 16, (0, 1))[0]
    assert ((counts - u.size / 16) ** 2 / (u.size / 16)).sum() < 45, "chi-squared, 15 degrees of freedom: p < 1e-4"
    for neighbour in (np.roll(u, 1, 0), np.roll(u, 1, 1), np.roll(u, 1, 2), np.asarray(x)):
        assert abs(np.corrcoef(u.ravel(), neighbour.ravel())[0, 1]) < 0.03
    np.testing.assert_array_equal(rounding.uniform(x), u)
    touched = np.asarray(uniform(x.at[3, 0, 0].multiply(1.01))) != u
    assert touched[3].mean() > 0.99, "the group's bits decide its numbers"
    assert not np.delete(touched, 3, 0).any(), "and no other group's"
    constant = np.asarray(uniform(jnp.ones((512, 2, 32), jnp.float32)))
    assert np.unique(constant).size > 0.99 * constant.size, "equal groups round differently"


@functools.partial(jax.jit, static_argnums=0)
def mean_error(how, x):
    """Of decoded values, in standard errors of the mean if errors were uniform over one scale each way."""
    codes, scale = jk.quantize(x, (1, 2), "bfloat16", how)
    error = (jk.dequantize(codes, scale, (1, 2), x.dtype) - x).astype(jnp.float64)
    return error.mean() / (scale.astype(jnp.float64).mean() * (3 * error.size) ** -0.5)


@pytest.mark.parametrize("fill", ["uniform", "greatest", "fixed"])
def test_stochastic_rounding_is_unbiased(fill):
    shape, key = (1024, 2, 32), jax.random.key(1)
    x = jax.random.uniform(key, shape, jnp.float32)
    if fill == "greatest":  # what a scale of max/8 would clip
        x = x.at[:].set(1 + x / 50)
    if fill == "fixed":  # which nearest rounding always rounds the same way
        x = jnp.full(shape, 0.3, jnp.float32).at[:, 0, 0].set(1 + x[:, 0, 0])
    assert abs(mean_error(jk.STOCHASTIC, x)) < 4
    if fill != "uniform":
        assert abs(mean_error(jk.NEAREST, x)) > 4, "nearest rounding is biased here: the test can fail"
