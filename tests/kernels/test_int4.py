"""The INT4 references against the numpy oracle, code by code."""

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_kernels as jk
from tests.kernels import oracle

pytestmark = pytest.mark.core
few = settings(max_examples=40)
SCALES = ("bfloat16", "float32")
AXES = ((1, 2), (0,))


def blocks(dtype):
    """(3, 2, 4) of a few magnitudes, zeros and ties among them."""
    width = 8 * np.dtype(dtype).itemsize
    plain = st.floats(-1e4, 1e4, width=width)
    values = st.one_of(plain, st.integers(-8, 8).map(float), st.sampled_from([0.0, -0.0, 0.5, 1e-40, 1e-30, 3e38]))
    return hnp.arrays(dtype, (3, 2, 4), elements=values.map(lambda v: np.dtype(dtype).type(v)))


def groups(x, axes):
    """Each group's values, flat in the order of the codes, and where they lie in (3, 2, 4)."""
    index = [np.s_[i] for i in range(3)] if axes == (1, 2) else [np.s_[:, i, j] for i in range(2) for j in range(4)]
    return [(np.asarray(x)[i].ravel(), i) for i in index]


def test_every_byte_unpacks_to_two_codes_that_pack_to_it():
    every = jnp.arange(256, dtype=jnp.uint8).reshape(16, 16)
    codes = jk.unpack_int4(every)
    assert codes.dtype == jnp.int8
    assert codes.shape == (16, 2, 16)
    assert int(codes.min()) == -8
    assert int(codes.max()) == 7
    np.testing.assert_array_equal(jk.pack_int4(codes), every)


@given(hnp.arrays(np.int8, (2, 2, 3), elements=st.integers(-8, 7)))
@few
def test_packing_is_a_bijection_and_halves_share_a_byte(q):
    got = jk.pack_int4(jnp.asarray(q))
    assert np.asarray(got).tobytes() == b"".join(oracle.packed(row.ravel()) for row in q)
    np.testing.assert_array_equal(jk.unpack_int4(got), q)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_symmetric_is_the_oracle(dtype, scale, axes):
    encode = jax.jit(lambda x: jk.quantize(x, axes, scale))

    @given(blocks(dtype))
    @few
    def check(x):
        codes, scales = encode(x)
        decoded = jk.dequantize(codes, scales, axes, dtype)
        for (values, at), s in zip(groups(x, axes), np.asarray(scales, np.float64)):
            q, want = oracle.symmetric(values, scale)
            assert s == want
            np.testing.assert_array_equal(np.asarray(jk.unpack_int4(codes))[at].ravel(), q)
            limit = np.finfo(dtype).max
            np.testing.assert_allclose(np.asarray(decoded)[at].ravel(), np.clip(q * s, -limit, limit), rtol=1e-6)

    check()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_asymmetric_is_the_oracle(dtype, scale):
    encode = jax.jit(lambda x: jk.quantize_offset(x, (1, 2), scale))

    @given(blocks(dtype).map(lambda x: np.clip(x, -1e30, 1e30)))
    @few
    def check(x):
        codes, scales, offsets = encode(x)
        decoded = np.asarray(jk.dequantize_offset(codes, scales, offsets, (1, 2), dtype))
        for row, s, o in zip(range(3), np.asarray(scales, np.float64), np.asarray(offsets, np.float64)):
            q, want, offset = oracle.asymmetric(x[row].ravel(), scale)
            assert (s, o) == (want, offset)
            np.testing.assert_array_equal(np.asarray(jk.unpack_int4(codes))[row].ravel(), q)
            np.testing.assert_allclose(decoded[row].ravel(), q * s + o, rtol=1e-6, atol=1e-6 * (s + abs(o)))

    check()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", SCALES)
def test_what_shares_a_scale_with_a_value_that_is_not_finite_is_nan(scale, bad):
    x = np.ones((3, 2, 4), np.float32)
    x[1, 1, 2] = bad
    for axes, width in (((1, 2), 8), ((0,), 3)):
        symmetric = jax.jit(lambda x, axes=axes: jk.dequantize(*jk.quantize(x, axes, scale), axes, x.dtype))
        offset = jax.jit(lambda x, axes=axes: jk.dequantize_offset(*jk.quantize_offset(x, axes, scale), axes, x.dtype))
        for decoded in (symmetric(x), offset(x)):
            spoilt = np.isnan(decoded)
            assert spoilt.sum() == width
            assert spoilt.all(axes).sum() == 1
            assert spoilt[1, 1, 2]
