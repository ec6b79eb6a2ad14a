"""The INT4 references against the numpy oracle, code by code. Groups of parts, and bits, are
inverted for every shape. Scales are rounded up. Stochastic rounding is unbiased and repeatable.
"""

import functools
import math

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_kernels as jk
from jaxmem_kernels import int4, layout, rounding
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


SHAPES = [(0,), (1,), (7,), (64,), (130,), (3, 5), (0, 4), (4, 0), (2, 3, 8)]


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_inverted(shape, parts):
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    group = jk.fitted(shape[-1], 16, parts)
    blocks = layout.blocks(x, group, parts)
    assert blocks.shape == (*shape[:-1], -(-shape[-1] // group), parts, group // parts)
    np.testing.assert_array_equal(layout.unblocked(blocks, shape[-1]), x)
    for row, whole in (
        zip(np.reshape(blocks, (-1, math.prod(blocks.shape[-3:]))), x.reshape(-1, shape[-1]))
        if x.size
        else ()
    ):
        assert set(np.unique(row)) <= set(np.unique(whole)), (
            "nothing but a row's own values enters its groups"
        )


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((8, 5, 128), (8, 5, 128)),
        ((8, 4, 32), (8, 128)),
        ((3, 4, 32), (3, 128)),
        ((8, 5, 7), (280,)),
        ((130,), (130,)),
        ((), (1,)),
        ((4, 0), (0,)),
        ((0, 64), (0, 64)),
    ],
)
def test_no_more_axes_are_merged_than_groups_need(shape, want):
    assert jk.folded(shape, 64) == want


@given(hnp.arrays(bool, (2, 3, 24)))
@settings(max_examples=40)
def test_bits_are_a_bijection(b):
    packed = jk.pack_bits(b, False, group=24)
    assert np.asarray(packed).tobytes() == b"".join(oracle.bits(row) for row in b.reshape(6, 24))
    unpacked = jk.unpack_bits(packed, jnp.zeros((), bool), jnp.ones((), bool), width=24)
    assert unpacked.dtype == jnp.bool_
    np.testing.assert_array_equal(unpacked, b)
    of_numbers = jk.pack_bits(jnp.where(b, 1.5, -2.0), jnp.array(-2.0), group=24)
    np.testing.assert_array_equal(of_numbers, packed)
    np.testing.assert_array_equal(
        jk.unpack_bits(packed, jnp.array(-2.0), jnp.array(1.5), width=24), np.where(b, 1.5, -2.0)
    )


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
