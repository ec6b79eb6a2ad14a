"""The INT4 references against the numpy oracle, code by code."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_kernels as jk
from jaxmem_kernels import int4
from tests.kernels import oracle

few = settings(max_examples=40)
SCALES = ("bfloat16", "float32")
QUICK = "float32-bfloat16", "float64-float32"
HOW = {"group": 8, "stochastic": False}


def rows(dtype):
    """(3, 16), two groups a row, of a few magnitudes, zeros and ties among them."""
    width = 8 * np.dtype(dtype).itemsize
    plain = st.floats(-1e4, 1e4, width=width)
    edges = [0.0, -0.0, 0.5, 1e-40, 1e-30, 3.4e38, -3.4e38]
    values = st.one_of(plain, st.integers(-8, 8).map(float), st.sampled_from(edges))
    return hnp.arrays(dtype, (3, 16), elements=values.map(lambda v: np.dtype(dtype).type(v)))


def groups(a) -> np.ndarray:
    """Each group's values, in the order of scales."""
    return np.asarray(a).reshape(6, 8)


def codes_of(packed) -> np.ndarray:
    return groups(int4.unpack_int4(packed))


@given(hnp.arrays(np.int8, (2, 2, 3), elements=st.integers(-8, 7)))
@few
def test_packing_is_a_bijection_and_halves_share_a_byte(q):
    got = int4.pack_int4(jnp.asarray(q))
    assert np.asarray(got).tobytes() == b"".join(oracle.packed(row.ravel()) for row in q)
    np.testing.assert_array_equal(int4.unpack_int4(got), q)


WAYS = {
    "symmetric": (jk.quantize, jk.dequantize, oracle.symmetric),
    "asymmetric": (jk.quantize_offset, jk.dequantize_offset, oracle.asymmetric),
}


@pytest.mark.quick(*(f"{way}-{how}" for way in WAYS for how in QUICK))
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
def test_codes_are_the_oracles(way, dtype, scale):
    quantize, dequantize, plain = WAYS[way]
    encode = jax.jit(lambda x: quantize(x, scale=scale, **HOW))

    @given(rows(dtype))
    @few
    def check(x):
        codes, *stored = encode(x)
        decoded = groups(dequantize(codes, *stored, width=16, dtype=dtype))
        assert [a.shape for a in (codes, *stored)] == [(3, 2, 4), *[(3, 2)] * len(stored)]
        of_groups = zip(*(np.asarray(a, np.float64).ravel() for a in stored))
        for values, of_group, got, back in zip(groups(x), of_groups, codes_of(codes), decoded):
            q, *want = plain(values, scale)
            assert list(of_group) == want
            np.testing.assert_array_equal(got, q)
            s, o = (*of_group, 0.0)[:2]
            limit = np.finfo(dtype).max
            wanted = np.clip(q * s + o, -limit, limit)
            near = 1e-6 * (s + abs(o)) if way == "asymmetric" else 0
            np.testing.assert_allclose(back, wanted, rtol=1e-6, atol=near)

    check()


@given(rows("float32").map(lambda x: np.clip(x, -1e30, 1e30)), st.integers(0, 15))
@few
def test_given_scales_are_used_and_taken_channels_are_left_out(x, channel):
    scales = np.ldexp(1.0, np.arange(16) - 8).astype(np.float32)
    codes = jk.quantize_by(x, scales, **HOW)
    want = np.clip(np.rint(x / scales), -8, 7)
    np.testing.assert_array_equal(codes_of(codes), groups(want))
    np.testing.assert_array_equal(
        jk.dequantize_by(codes, scales, width=16, dtype="float32"), want * scales
    )
    taken = np.arange(16) == channel
    without = jk.quantize_without(x, taken, scale="float32", **HOW)
    for got, plain in zip(
        without, jk.quantize(np.where(taken, np.float32(0), x), scale="float32", **HOW)
    ):
        np.testing.assert_array_equal(got, plain)
    slots = np.where(taken, 1, 2).astype(np.int32)
    values = np.stack([x[:, channel] + 1, x[:, channel]], -1)
    back = np.asarray(jk.dequantize_with(*without, values, slots, width=16, dtype="float32"))
    np.testing.assert_array_equal(back[:, channel], x[:, channel])
    plain = np.asarray(jk.dequantize(*without, width=16, dtype="float32"))
    np.testing.assert_array_equal(back[:, ~taken], plain[:, ~taken])


@functools.cache
def round_trips(width, scale):
    """Symmetric and with offsets, of float32."""
    back = {"width": width, "dtype": "float32"}
    symmetric = lambda x: jk.dequantize(*jk.quantize(x, scale=scale, **HOW), **back)
    offset = lambda x: jk.dequantize_offset(*jk.quantize_offset(x, scale=scale, **HOW), **back)
    return jax.jit(lambda x: (symmetric(x), offset(x)))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(3, 16), (65, 64), (4099,)], ids=str)
def test_what_shares_a_scale_with_a_value_that_is_not_finite_is_nan(shape, scale, bad):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x.flat[21] = bad
    for decoded in round_trips(shape[-1], scale)(x):
        assert np.flatnonzero(np.isnan(decoded)).tolist() == list(range(16, 24))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_greatest_is_nan_where_one_is(dtype):
    x = np.random.default_rng(0).normal(size=(65, 64)).astype(dtype)
    x[21, 5], x[30, 63], x[40, 0] = np.nan, -np.nan, -np.inf
    found = np.asarray(jax.jit(lambda x: jk.greatest(x, -1))(x))
    want = np.abs(x).max(-1)
    np.testing.assert_array_equal(found, want)
    assert np.isnan(found[[21, 30]]).all()
    np.testing.assert_array_equal(jk.greatest(jnp.zeros((3, 0), dtype), -1), 0)


def test_under_vmap_and_in_derivatives_an_operation_is_its_reference():
    x = jax.random.normal(jax.random.key(0), (3, 5, 32), jnp.float32)
    how = {"group": 16, "scale": "bfloat16", "stochastic": True}
    for one, whole in zip(
        jax.vmap(lambda x: jk.quantize(x, **how), 1, 1)(x), jk.quantize(x, **how)
    ):
        np.testing.assert_array_equal(one, whole)
    scales = 1 + jnp.arange(3 * 32, dtype=jnp.float32).reshape(3, 32)
    by = lambda x, s: jk.quantize_by(x, s, group=16, stochastic=False)
    np.testing.assert_array_equal(
        jax.vmap(by)(x, scales), jnp.stack([by(*row) for row in zip(x, scales)])
    )
    codes, s = jk.quantize(x, **how)
    decode = lambda s: jk.dequantize(codes, s, width=32, dtype="float32").sum()
    plain = lambda s: int4.dequantize(codes, s, width=32, dtype="float32").sum()
    s = s.astype(jnp.float32)
    np.testing.assert_array_equal(jax.grad(decode)(s), jax.grad(plain)(s))
