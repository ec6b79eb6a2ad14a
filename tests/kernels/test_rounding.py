"""Scales are rounded up, and stochastic rounding is unbiased and repeats itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_kernels as jk
from jaxmem_kernels import rounding


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 8), ("float32", 24), ("float32", 21)])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_a_scale_is_the_least_number_not_below(wide, dtype, digits):
    exact = np.exp(np.random.default_rng(0).uniform(-80, 80, 500)).astype(wide)
    exact = np.concatenate([exact, np.array([1, 1.0078125, 2.0**-125, 2.0**127], wide)])

    def both(s):  # in one program, where XLA may drop pairs of conversions
        up = rounding.round_up(s, dtype, digits)
        return up, up.astype(s.dtype) >= s

    up, covers = jax.jit(both)(exact)
    assert up.dtype == dtype
    assert covers.all()
    up = np.asarray(up, np.float64)
    assert (up >= exact).all()
    assert (up - exact < exact * 2.0 ** (1 - digits)).all()
    assert (up[-4:] == exact[-4:]).all()
    products = up[up < 1e37][:, None] * np.arange(-8, 8)
    assert digits > 21 or (products.astype(np.float32) == products).all(), (
        "a code times a scale is exact"
    )


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize(
    ("exact", "want"),
    [(0, 0), (1e-42, 0), (3.4e38, np.nan), (np.inf, np.nan), (np.nan, np.nan), (2.0**-127, 0)],
)
def test_a_scale_without_a_bfloat16_is_zero_or_nan(exact, want, wide):
    np.testing.assert_array_equal(
        rounding.round_up(jnp.asarray(exact, wide), jnp.bfloat16).astype(wide), want
    )


def rounded(fraction, x):
    """Where a fraction (a number, or one for each of `x`) goes: 0 or 1."""
    return np.asarray(
        jax.jit(rounding.round_stochastic)(jnp.broadcast_to(jnp.float32(fraction), x.shape), x)
    )


def test_random_rounding_is_fair_and_depends_on_values_and_place():
    x = jax.random.normal(jax.random.key(0), (512, 1, 2, 32), jnp.float32)
    for fraction in (0.0625, 0.3, 0.5, 0.9):
        up = rounded(fraction, x)
        assert set(np.unique(up)) == {0, 1}
        z = (up.mean() - fraction) / np.sqrt(fraction * (1 - fraction) / up.size)
        assert abs(z) < 4
        rolled = (np.roll(up, 1, axis) for axis in (0, 2, 3))
        for neighbour in (*rolled, np.asarray(x), np.asarray(x) ** 2):
            assert abs(np.corrcoef(up.ravel(), neighbour.ravel())[0, 1]) < 0.03
    up = rounded(0.5, x)
    np.testing.assert_array_equal(rounded(0.5, x), up)
    touched = rounded(0.5, x * (1 + 2.0**-20)) != up
    assert 0.45 < touched.mean() < 0.55, "a value's last bits decide"
    constant = rounded(0.5, jnp.ones((1, 512, 2, 32), jnp.float32))
    assert abs(constant.mean() - 0.5) < 4 * 0.5 / constant.size**0.5, (
        "equal values round differently along a row"
    )
    few = jnp.round(x).reshape(1, 512, 2, 32)
    assert abs(rounded(0.5, few).mean() - 0.5) < 4 * 0.5 / few.size**0.5, (
        "and so do values of few bits"
    )


def test_seeds_tell_equal_pairs_apart():
    few = jnp.array([0.25, 1.5, 1.5, -3.0], jnp.float32).reshape(1, 2, 2)
    x = jnp.broadcast_to(few, (5, 1, 2, 2))
    seeds = range(600)
    ups = np.stack([rounding.round_stochastic(jnp.full(x.shape, 0.3), x, s) for s in seeds])
    assert (ups == ups[:, :1]).all(), "equal rows round alike under one seed"
    assert set(np.unique(ups)) == {0, 1}
    one = ups[:, 0].reshape(len(seeds), -1)
    z = (one.mean(0) - 0.3) / np.sqrt(0.3 * 0.7 / len(seeds))
    assert np.abs(z).max() < 4, "and without bias over seeds, each pair by itself"
    between = np.corrcoef(np.concatenate([one[1:], one[:-1]], 1), rowvar=False)
    between[np.diag_indices(len(between))] = 0
    assert np.abs(between).max() < 0.2
    np.testing.assert_array_equal(ups[0], rounding.round_stochastic(jnp.full(x.shape, 0.3), x))


def test_seed_0_rounds_as_ever():
    x = jax.lax.bitcast_convert_type(jnp.arange(64, dtype=jnp.uint32) * 0x01234567, jnp.float32)
    up = rounded(0.5, x.reshape(2, 1, 2, 16)).reshape(-1)
    assert "".join(str(int(u)) for u in up) == (
        "0110111110000010110110011111011110011111001000000001101011101000"
    )


@functools.partial(jax.jit, static_argnums=0)
def mean_error(stochastic, x):
    """Of decoded values, in standard errors of the mean if errors were uniform over one scale each
    way.
    """
    codes, scale = jk.quantize(x, group=64, scale="bfloat16", stochastic=stochastic)
    back = jk.dequantize(codes, scale, width=x.shape[-1], dtype="float32")
    error = (back - x).astype(jnp.float64)
    return error.mean() / (scale.astype(jnp.float64).mean() * (3 * error.size) ** -0.5)


@pytest.mark.parametrize("fill", ["uniform", "greatest", "fixed"])
def test_stochastic_rounding_is_unbiased(fill):
    shape, key = (65536,), jax.random.key(1)
    x = jax.random.uniform(key, shape, jnp.float32)
    if fill == "greatest":  # what a scale of max/8 would clip
        x = 1 + x / 50
    if fill == "fixed":  # which nearest rounding always rounds the same way
        x = jnp.full(shape, 0.3, jnp.float32).at[::64].set(1 + x[::64])
    assert abs(mean_error(True, x)) < 4
    if fill != "uniform":
        assert abs(mean_error(False, x)) > 4, "nearest rounding is biased here: the test can fail"
