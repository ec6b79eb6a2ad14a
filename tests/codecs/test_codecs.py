"""Every codec over shapes and dtypes: exact bytes, the bound that its own scales give, nothing made
finite.
"""

import functools
import math

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem import codecs
from jaxmem.codecs import (
    BitMask,
    ChannelwiseSymmetric,
    GroupedAsymmetric,
    GroupedSymmetric,
    NaivePerToken,
    OutlierSeparated,
)
from jaxmem.plans import Choice

GROUPED = (
    GroupedSymmetric(),
    GroupedSymmetric(group=6, scale="float32"),
    GroupedSymmetric(stochastic=True, seed=7),
    GroupedAsymmetric(group=32),
    GroupedAsymmetric(scale="float32", stochastic=True),
)
BY_ROWS = (
    ChannelwiseSymmetric(),
    ChannelwiseSymmetric("float32", stochastic=True),
    NaivePerToken(),
)
SEPARATED = (
    OutlierSeparated(group=8, capacity=2),
    OutlierSeparated(scale="float32", stochastic=True, seed=2**32 - 1),
)
INT4 = (*GROUPED, *BY_ROWS, *SEPARATED)
EVERY = (*INT4, BitMask())
ONE_OF_EACH = (GROUPED[2], GROUPED[3], *BY_ROWS[::2], SEPARATED[0], BitMask())
SHAPES = [(), (0,), (5, 23), (0, 14), (3, 0), (2, 3, 7), (130,), (4, 64)]
CASES = [((4, 64), "float32"), ((5, 23), "bfloat16"), ((2, 3, 7), "float16"), ((130,), "float64")]
by_codec = pytest.mark.parametrize("codec", INT4, ids=str)


@functools.cache
def round_trip(codec):
    def both(x):
        codes = codec.encode(x)
        return codes, codec.decode(codes, x.shape, x.dtype)

    return jax.jit(both)


def arrays(shape, dtype):
    """Values whose sizes differ little, mostly; zeros, ties, denormals and the greatest are among
    them.
    """
    info = ml_dtypes.finfo(dtype)
    edges = [0.0, -0.0, *map(float, (info.smallest_subnormal, info.tiny, info.max, -info.max))]
    plain = st.one_of(st.floats(-100, 100), st.integers(-8, 8).map(float))
    values = st.one_of(plain, plain, plain, st.sampled_from(edges))
    if dtype == "float64":  # past float32's range a scale overflows: a test of its own
        values = values.map(lambda v: min(max(v, -1e38), 1e38))
    return hnp.arrays(np.float64, shape, elements=values).map(lambda x: x.astype(jnp.dtype(dtype)))


def spread(codec, stored, shape):
    """Stored scales or offsets, one a value: where a codec's docstring says that it applies."""
    stored, size = np.asarray(stored, np.float64), math.prod(shape)
    if isinstance(codec, ChannelwiseSymmetric):
        return np.broadcast_to(stored[: shape[-1] if shape else 1], shape or (1,)).reshape(shape)
    if isinstance(codec, NaivePerToken):
        return np.repeat(stored, shape[-1] if shape else 1).reshape(shape)
    return np.repeat(stored, min(codec.group, size + size % 2))[:size].reshape(shape)


@by_codec
def test_error_is_within_the_bound(codec):
    @given(st.sampled_from(CASES).flatmap(lambda case: arrays(*case)))
    @settings(max_examples=25)
    def check(x):
        codes, decoded = round_trip(codec)(x)
        assert decoded.shape == x.shape
        assert decoded.dtype == x.dtype
        exact, got = np.asarray(x, np.float64), np.asarray(decoded, np.float64)
        assert np.isfinite(got).all(), "finite values stay finite"
        s = spread(codec, codes[1], x.shape)
        asymmetric = isinstance(codec, GroupedAsymmetric)
        o = spread(codec, codes[2], x.shape) if asymmetric else np.zeros(x.shape)
        assert (np.abs(exact - o) <= 8 * s * (1 + 1e-6) + 2.0**-122).all() or isinstance(
            codec, OutlierSeparated
        )
        above = exact - o <= 7 * s * (1 + 1e-6) + 2.0**-122
        assert above.all() or not asymmetric, "an offset leaves nothing to be clipped"
        clipped = (exact - o > 7.5 * s * (1 - 1e-6)) & (not asymmetric)
        bound = s if getattr(codec, "stochastic", False) else np.where(clipped, s, s / 2)
        rounding = float(ml_dtypes.finfo(x.dtype).eps) / 2 * np.abs(got) + float(
            ml_dtypes.finfo(x.dtype).smallest_subnormal
        )
        arithmetic = 2.0**-20 * (s + np.abs(o))  # of float32 quotients and sums
        within = np.abs(exact - got) <= bound + rounding + arithmetic + 2.0**-122
        separate = separated(codec, codes, x)
        assert (within | separate).all()
        assert (exact[separate] == got[separate]).all()

    check()


def separated(codec, codes, x):
    """Which values of `x` were stored as they are."""
    stored = np.zeros(x.shape, bool)
    if isinstance(codec, OutlierSeparated) and codec.slots(x.shape):
        index = np.asarray(codes[-1])
        stored[..., index[index < x.shape[-1]]] = True
    return stored


@by_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(codec, bad):
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    x[2, 17] = bad
    decoded = np.asarray(round_trip(codec)(x)[1])
    assert not np.isfinite(decoded[2, 17])
    assert np.isfinite(decoded[1, :16]).all(), "it spoils its own group alone"


@by_codec
def test_float64_past_the_scales_range_is_nan_or_stored_exactly(codec):
    x = np.ones(130)
    x[77] = 1e300
    codes, decoded = round_trip(codec)(x)
    assert decoded[77] == x[77] if separated(codec, codes, x)[77] else np.isnan(decoded[77])


@pytest.mark.parametrize("codec", EVERY, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_nbytes_is_what_encode_returns(codec, dtype):
    for shape in SHAPES:
        x = jax.ShapeDtypeStruct(shape, dtype)
        codes = jax.eval_shape(codec.encode, x)
        assert codec.nbytes(shape, dtype) == sum(c.size * c.dtype.itemsize for c in codes)
        assert codec.nbytes(shape, jnp.dtype(dtype)) == codec.nbytes(shape, dtype)
        decoded = jax.eval_shape(lambda *c, x=x: codec.decode(c, x.shape, x.dtype), *codes)
        assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
        assert all(c.size for c in codes) or not math.prod(shape), "no empty arrays to hold"
        assert not any("int4" in str(c.dtype) for c in codes), "which take a byte each"


def test_bytes_of_a_gpt_tensor():
    shape, values = (8, 1024, 768), 8 * 1024 * 768
    assert GroupedSymmetric().nbytes(shape, "bfloat16") == values // 2 + values // 64 * 2
    assert GroupedAsymmetric().nbytes(shape, "bfloat16") == values // 2 + values // 64 * 4
    assert ChannelwiseSymmetric("float32").nbytes(shape, "bfloat16") == values // 2 + 768 * 4
    assert NaivePerToken().nbytes(shape, "bfloat16") == values // 2 + 8 * 1024 * 2
    assert OutlierSeparated(capacity=4).nbytes(shape, "bfloat16") == (
        values // 2 + values // 64 * 2 + 4 * (8 * 1024 * 2 + 4)
    )
    assert BitMask().nbytes(shape, "bool") == values // 8


@pytest.mark.quick(
    "grouped_symmetric(group=64,scale=bfloat16,stochastic=true,seed=7)", "bit_mask()"
)
@pytest.mark.parametrize("codec", ONE_OF_EACH, ids=str)
def test_under_jit_vmap_scan_and_shard_map(codec, optimized):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 33)), jnp.bfloat16)
    x = (x > 0).astype(x.dtype) if isinstance(codec, BitMask) else x.at[..., 5].multiply(30)
    one = lambda x: codec.decode(codec.encode(x), x.shape, x.dtype)
    jitted = jax.jit(one)
    want = np.stack([jitted(row) for row in x])
    np.testing.assert_array_equal(jax.vmap(jitted)(x), want)
    np.testing.assert_array_equal(
        jax.lax.scan(lambda carry, row: (carry, one(row)), None, x)[1], want
    )
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(jax.vmap(one), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(sharded)(x), want)


@pytest.mark.parametrize(
    "codec", [c for c in EVERY if not isinstance(c, OutlierSeparated)], ids=str
)
def test_sizes_that_fit_are_encoded_without_moving_data(codec):
    x = jax.ShapeDtypeStruct((4, 16, 192), "bfloat16")
    codec = GroupedSymmetric() if codec.__dict__.get("group") == 6 else codec
    program = str(jax.make_jaxpr(codec.encode)(x))
    moved = [
        word for word in ("pad[", "gather[", "scatter", "transpose[", "sort") if word in program
    ]
    assert not moved
    if not isinstance(codec, BitMask):  # which stacks its two values
        assert "concatenate[" not in program


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_codecs_are_values(codec):
    assert isinstance(codec, codecs.Codec)
    assert hash(codec) == hash(codecs.parse(str(codec)))
    assert Choice("compress", codec) == Choice("compress", str(codec))
    with pytest.raises(AttributeError, match="cannot assign"):
        codec.scale = "float32"


@pytest.mark.quick(
    "grouped_symmetric(group=64,scale=bfloat16,stochastic=true,seed=7)", "bit_mask()"
)
@pytest.mark.parametrize("codec", ONE_OF_EACH, ids=str)
def test_ranks_need_not_be_promoted(codec):
    """Every codec can be lowered, alone and under `vmap`, if JAX broadcasts over no ranks."""
    both = lambda x: codec.decode(codec.encode(x), x.shape, x.dtype)
    rows = jax.ShapeDtypeStruct((3, 2, 47), "float32")  # which no other test has traced
    with jax.numpy_rank_promotion("raise"):
        jax.jit(both).lower(rows)
        jax.jit(jax.vmap(both)).lower(rows)
