"""What single codecs promise: outlier channels, channels of their own, one bit a value, defaults,
text. GroupedAsymmetric covers the whole range of a group, peak and zeros included, and its scale is
a fifteenth of that range, whatever its offset is rounded to.
"""

import functools

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
from jaxmem.errors import TagError
from tests.kernels import oracle
from tests.shared.refused import refused

encode = functools.partial(jax.jit, static_argnums=0)(lambda codec, x: codec.encode(x))
count = functools.partial(jax.jit, static_argnums=0)(lambda codec, x: codec.count(x))


@functools.partial(jax.jit, static_argnums=0)
def decoded(codec, x):
    return codec.decode(codec.encode(x), x.shape, x.dtype)


def back(codec, x):
    return np.asarray(decoded(codec, x))


def with_outliers(channels, width=96, tokens=40, seed=0):
    """(tokens, width) of normal values; channels {index: factor} are that much greater."""
    x = np.random.default_rng(seed).normal(size=(tokens, width)).astype(np.float32)
    for channel, factor in channels.items():
        x[:, channel] *= factor
    return x


@pytest.mark.parametrize("channels", [{}, {3: 50}, {0: 40, 95: 60}, {7: 30, 8: 35, 9: 40, 50: 45}])
def test_outlier_channels_are_those_of_the_definition(channels):
    x = with_outliers(channels)
    codec = OutlierSeparated(capacity=3)
    want = oracle.outliers(x)
    assert sorted(want) == sorted(channels)
    assert int(count(codec, x)) == len(want)
    *_, values, index = encode(codec, x)
    kept = want[:3]
    assert list(np.asarray(index)) == kept + [96] * (3 - len(kept))
    np.testing.assert_array_equal(np.asarray(values)[:, : len(kept)], x[:, kept])
    assert not np.asarray(values)[:, len(kept) :].any()
    np.testing.assert_array_equal(back(codec, x)[:, kept], x[:, kept])


@given(st.integers(11, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_outliers_never_exceed_a_tenth(width, seed):
    x = np.random.default_rng(seed).standard_cauchy((1, 40))[:, :width]
    x = np.pad(x, ((0, 0), (0, 40 - width)))
    assert len(oracle.outliers(x)) <= OutlierSeparated(capacity=99).slots(x.shape) == 3
    assert int(count(OutlierSeparated(), x)) == len(oracle.outliers(x))


def test_separation_helps_the_rest_and_the_naive_codec_suffers_most():
    x = with_outliers({3: 60, 40: 80}).astype(jnp.bfloat16)
    normal = np.delete(np.arange(96), [3, 40])
    names = ("outlier_separated", "grouped_symmetric", "channelwise_symmetric", "naive_per_token")
    error = {
        name: np.abs(back(codecs.parse(name), x).astype(np.float64) - x)[:, normal].mean()
        for name in names
    }
    assert error["outlier_separated"] < 0.15
    assert error["channelwise_symmetric"] < 0.15
    assert error["naive_per_token"] > 4 * error["outlier_separated"]
    assert error["naive_per_token"] > error["grouped_symmetric"] > 2 * error["outlier_separated"]


def test_a_channel_has_its_own_scale_whatever_the_others_do():
    x = with_outliers({3: 1e4}).reshape(5, 8, 96)
    scales = np.asarray(encode(ChannelwiseSymmetric("float32"), x)[1])
    np.testing.assert_allclose(scales, np.abs(x).max((0, 1)) / 8, rtol=1e-7)


MASKS = [
    ("bool", (False, True)),
    ("int8", (0, 1)),
    ("uint64", (0, 2**63)),
    ("int32", (-5, 7)),
    ("bfloat16", (0, 1)),
]
MASKS += [
    ("float16", (0, 1 / 0.9)),
    ("float32", (-np.inf, 0)),
    ("float64", (0.1, 0.3)),
    ("float32", (0, np.inf)),
]


@pytest.mark.parametrize(
    ("dtype", "values", "shape"),
    [(*mask, (7, 9)) for mask in MASKS]
    + [(*mask, shape) for mask in MASKS[:6:5] for shape in ((), (0,), (4, 256))],
)
def test_masks_are_lossless(dtype, values, shape):
    chosen = np.random.default_rng(0).integers(0, 2, shape)
    values = np.array(values, jnp.dtype(dtype))
    for x in (values[chosen], np.full(shape, values[1])):
        got = back(BitMask(), jnp.asarray(x))
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)
    count = -(-chosen.size // 8) if chosen.size < 256 else chosen.size // 8
    assert encode(BitMask(), jnp.asarray(x))[0].nbytes == count


@pytest.mark.parametrize("third", [0.5, 2.0, np.nan, np.inf, -np.inf])
def test_a_third_value_is_not_turned_into_one_of_two(third):
    x = np.array([0, 1, 1, 0, third, 1], np.float32)
    got = back(BitMask(), x)
    assert np.isnan(got[4]) or got[4] == third
    assert all(np.isnan(g) or g == v for g, v in zip(got, x))


def test_stochastic_codes_repeat_themselves():
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    a, b = (encode(GroupedSymmetric(stochastic=True), x)[0] for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert (a != encode(GroupedSymmetric(), x)[0]).mean() > 0.2


@pytest.mark.quick("GroupedSymmetric", "ChannelwiseSymmetric")
@pytest.mark.parametrize(
    "codec", [GroupedSymmetric, GroupedAsymmetric, ChannelwiseSymmetric, OutlierSeparated]
)
def test_a_seed_rounds_equal_rows_otherwise(codec):
    row = np.random.default_rng(0).normal(size=64).astype(np.float32)
    x = np.concatenate([np.tile(row, (8, 1)), 3.3 * row[None]])  # the last sets channels' scales

    def of(seed, stochastic=True):
        codes = encode(codec(stochastic=stochastic, seed=seed), x)[0]
        return np.asarray(codes).reshape(9, -1)[:8]

    assert (of(0) == of(0)[0]).all(), "equal rows round alike"
    for a, b in ((0, 1), (1, 2), (0, 2**32 - 1)):
        assert (of(a) != of(b)).mean() > 0.2
    np.testing.assert_array_equal(of(0, False), of(1, False))


def test_errors_average_out_over_seeds():
    x = np.tile(np.array([0.3, 0.55, -0.8, 1.0], np.float32), 4)[None]
    seeded = [GroupedSymmetric(group=4, stochastic=True, seed=s) for s in range(64)]
    # One program for all, which compiles in a third of the time of one for each.
    errors = np.asarray(jax.jit(lambda x: jnp.stack([decoded(c, x) for c in seeded]))(x)) - x
    s = 1 / 7 * (1 + 2**-7)  # the greatest scale there may be, rounded up to bfloat16
    assert np.abs(errors.mean(0)).max() < 4 * s / 2 / 64**0.5
    assert np.abs(errors[0]).max() > 4 * s / 2 / 64**0.5, "of one seed they do not: this can fail"


def test_more_channels_than_an_int32_counts_are_refused():
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)
    encode = lambda codec, x: jax.eval_shape(codec.encode, x)
    for axes in ((2**31,), (3, 2**31), (2**33,)):
        said = r"outlier_separated: `x` has \d+ channels, .*at most 2147483647.*grouped_symmetric"
        with pytest.raises(TagError, match=said):
            encode(OutlierSeparated(), shape(*axes))
        with pytest.raises(TagError, match=said):
            OutlierSeparated().nbytes(axes, jnp.float32)
        assert encode(OutlierSeparated(capacity=0), shape(*axes))
    for axes in ((2**31 - 1,), (2**31, 64)):
        assert len(encode(OutlierSeparated(), shape(*axes))) == 4


def test_defaults_are_adaccs():
    by_kind = {kind: type(codecs.default_for(kind)) for kind in codecs.KINDS}
    assert by_kind == {
        **dict.fromkeys(("linear", "norm", "gelu", "residual"), OutlierSeparated),
        "qkv": ChannelwiseSymmetric,
        "softmax": GroupedAsymmetric,
        "mask": BitMask,
        "exact": type(None),
    }
    assert codecs.default_for(None) == GroupedSymmetric()
    with pytest.raises(TagError, match="expected None or one of linear, .*nearest: linear"):
        codecs.default_for("lineer")


groups, scales = st.integers(1, 512).map(lambda n: 2 * n), st.sampled_from(["bfloat16", "float32"])
flags, seeds = st.booleans(), st.integers(0, 2**32 - 1) | st.just(0)
described = st.one_of(
    st.builds(GroupedSymmetric, groups, scales, flags, seeds),
    st.builds(GroupedAsymmetric, groups, scales, flags, seeds),
    st.builds(OutlierSeparated, groups, scales, st.integers(0, 1000), flags, seeds),
    st.builds(ChannelwiseSymmetric, scales, flags, seeds),
    st.builds(NaivePerToken, scales),
    st.builds(BitMask),
)


@given(described)
@settings(max_examples=40)
def test_text_is_read_back(codec):
    assert codecs.parse(str(codec)) == codec
    assert str(codecs.parse(str(codec).replace(",", " , ").replace("(", " ( "))) == str(codec), (
        "canonical"
    )


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("grouped_symmetric", "grouped_symmetric(group=64,scale=bfloat16)"),
        (
            "outlier_separated(stochastic=true)",
            "outlier_separated(group=64,scale=bfloat16,capacity=8,stochastic=true)",
        ),
        (
            "channelwise_symmetric(seed=4294967295,stochastic=true)",
            "channelwise_symmetric(scale=bfloat16,stochastic=true,seed=4294967295)",
        ),
        ("channelwise_symmetric(seed=0)", "channelwise_symmetric(scale=bfloat16)"),
        ("bit_mask", "bit_mask()"),
    ],
)
def test_canonical_text(text, canonical):
    assert str(codecs.parse(text)) == canonical


def test_a_scale_may_be_given_as_a_dtype():
    scales = jnp.float32, np.dtype("float32"), "float32"
    assert len({GroupedSymmetric(scale=scale) for scale in scales}) == 1


@refused(
    TagError,
    ("grouped_symetric()", "nearest: grouped_symmetric"),
    ("mask", "nearest: bit_mask"),
    ("", "expected text such as"),
    (None, "expected text such as"),
    ("grouped_symmetric(group=64", "expected text such as"),
    ("grouped_symmetric(groups=64)", "nearest: group"),
    ("grouped_symmetric(group)", "expected field=value"),
    ("grouped_symmetric(group=64,group=32)", "at most once"),
    ("grouped_symmetric(group=63)", "`group` is 63; expected an even integer .*nearest: 64"),
    ("grouped_symmetric(group=-4)", "nearest: 2"),
    ("grouped_symmetric(group=all)", "`group` is 'all'"),
    ("grouped_symmetric(scale=float16)", "`scale` is 'float16'; .*nearest: bfloat16"),
    ("grouped_symmetric(stochastic=tru)", "nearest: true"),
    ("outlier_separated(capacity=-1)", "`capacity` is -1.*nearest: 0"),
    ("naive_per_token(group=64)", "nearest: "),
    ("grouped_asymmetric(seed=-1)", "`seed` is -1; .* at least 0 and at most .*; nearest: 0"),
    ("grouped_asymmetric(seed=4294967296)", "`seed` is 4294967296; .*; nearest: 4294967295"),
    ("bit_mask(group=64)", "no fields in bit_mask"),
)
def test_wrong_text(text):
    codecs.parse(text)


INT4 = (GroupedSymmetric, GroupedAsymmetric, OutlierSeparated, ChannelwiseSymmetric, NaivePerToken)


@pytest.mark.parametrize("codec", [of() for of in INT4], ids=lambda codec: codec.name)
def test_what_int4_cannot_take(codec):
    refused = rf"{codec.name}: `dtype` is .*expected one of bfloat16"
    for x in (*(jnp.zeros(3, dtype) for dtype in ("int32", bool, "complex64")), jax.random.key(0)):
        with pytest.raises(TagError, match=refused):
            codec.encode(x)
        for call in (codec.nbytes, codec.check):
            with pytest.raises(TagError, match=refused):
                call(x.shape, x.dtype)
    with pytest.raises(TagError, match="bit_mask: `dtype` is complex64"):
        BitMask().encode(jnp.zeros(3, jnp.complex64))


ROWS, GROUP = 3, 16
# By the scales' dtype: the share by which rounding up makes a scale greater at most, and by which
# rounding to the nearest moves an offset at most.
ROUNDED = {"bfloat16": (2.0**-7, 2.0**-8), "float32": (2.0**-20, 2.0**-24)}
DTYPES = ("float32", "bfloat16", "float16", "float64")
CODECS = [GroupedAsymmetric(GROUP, scale, how) for scale in ROUNDED for how in (False, True)]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x):
    """The decoded values, and scales and offsets, which broadcast to them."""
    codes = codec.encode(x)
    _, scales, offsets = codes
    return codec.decode(codes, x.shape, x.dtype), scales, offsets


def greatest_step(scale, width, offset):
    """What the codec's docstring allows a scale to be, of a range and a stored offset. An offset
    below 2^-100 is stored as 0.
    """
    up, moved = ROUNDED[scale]
    shift = np.where(offset, moved * np.abs(offset), 2.0**-100)
    step = (1 + up) ** 2 * width / 15 + (1 + up) * shift / 7
    return np.where(width > 1.8 * 2.0**128, np.maximum(step, width / 12), step)


def softmax(scores, sharpness):
    z = np.exp((scores - scores.max(-1, keepdims=True)) * sharpness)
    return z / z.sum(-1, keepdims=True)


def values(dtype):
    """Softmaxes from nearly equal probabilities to a single peak, and other ranges, some of them
    far from zero or as wide as numbers go.
    """
    scores = hnp.arrays(np.float64, (ROWS, GROUP), elements=st.floats(-4, 4))
    softmaxes = st.builds(softmax, scores, st.integers(-8, 8).map(lambda e: 2.0**e))
    far = st.sampled_from([0, 0, 1, -1, 3, -100, 1e4])
    moved = st.builds(lambda x, size, by: x * size + by, scores, st.integers(-3, 3), far)
    wide = scores.map(lambda x: x / 4 * min(float(ml_dtypes.finfo(dtype).max), 3.4e38))
    return st.one_of(softmaxes, softmaxes, moved, wide).map(lambda x: x.astype(jnp.dtype(dtype)))


@by_codec
@by_dtype
def test_nothing_is_clipped_and_a_step_is_a_fifteenth_of_the_range(codec, dtype):
    info = ml_dtypes.finfo(dtype)

    @given(values(dtype))
    @settings(max_examples=30)
    def check(x):
        got, s, o = (np.asarray(a, np.float64) for a in round_trip(codec, x))
        exact = np.asarray(x, np.float64)
        low, high = exact.min(-1, keepdims=True), exact.max(-1, keepdims=True)
        arithmetic = 2.0**-21 * (s + np.abs(o)) + 2.0**-122
        assert (o - 8 * s <= low + arithmetic).all()
        assert (high <= o + 7 * s + arithmetic).all()
        step = greatest_step(codec.scale, high - low, o)
        assert (s <= step + arithmetic).all()
        rounding = float(info.eps) / 2 * np.abs(got) + float(info.smallest_subnormal)
        error = np.abs(exact - got)
        assert (error <= (s if codec.stochastic else s / 2) + rounding + arithmetic).all()

    check()


@by_codec
@by_dtype
def test_zeros_that_are_the_least_of_a_group_stay_zeros(codec, dtype):
    elements = st.one_of(st.just(0.0), st.floats(0, 6e4), st.floats(0, 1e-3))
    rows = hnp.arrays(np.float64, (ROWS, GROUP), elements=elements)
    # Peaks that are fifteen times a scale, or next to that: the scale could come out greater from
    # the upper end than from the lower one.
    peaks = st.none() | st.tuples(st.integers(1, 127), st.sampled_from([-np.inf, 0, np.inf]))

    @given(rows, st.integers(0, GROUP - 1), peaks)
    @settings(max_examples=40)
    def check(x, masked, peak):
        x[:, masked] = 0
        number = jnp.dtype(dtype).type
        if peak:
            top, beside = number(15 * peak[0]), number(peak[1])
            x = np.minimum(x, 14 * peak[0])
        x = x.astype(number)
        if peak:
            x[:, masked - 1] = np.nextafter(top, beside) if beside else top
        got = np.asarray(round_trip(codec, x)[0])
        assert not got[np.asarray(x) == 0].any()

    check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_either_sign_that_are_as_great_as_numbers_go(dtype):
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.random.default_rng(0).uniform(-limit, limit, 4096).astype(jnp.dtype(dtype))
    x[:2] = -limit, limit
    for scale in ROUNDED:
        got, s, _ = round_trip(GroupedAsymmetric(4096, scale), x)
        s = float(s[0])
        rounding = limit * float(ml_dtypes.finfo(dtype).eps) / 2
        assert s <= greatest_step(scale, 2 * limit, 0.0)
        error = np.abs(np.asarray(got, np.float64) - np.asarray(x, np.float64))
        assert error.max() <= s / 2 * (1 + 2.0**-20) + rounding


@pytest.mark.parametrize("codec", [c for c in CODECS if c.scale == "bfloat16"], ids=str)
def test_eight_scales_may_overflow(codec):
    """With a scale of 2^125, -8 scales are -2^128, and the offset brings the sum back among the
    numbers of float32. No bfloat16 values, and no float32 scale, have this case.
    """
    limit = float(np.finfo(np.float32).max)
    low, high = np.linspace(-0.89, -0.86, 512), np.tile(np.linspace(0.98, 1, 16), 32)
    inner = np.random.default_rng(0).uniform(-0.86, 0.98, (512, GROUP - 2))
    x = (np.column_stack([low, inner, high]) * limit).astype(np.float32)
    got, s, o = (np.asarray(a, np.float64) for a in round_trip(codec, x))
    which = ((s == 2.0**125) & (o > 2.0**120))[:, 0]
    assert which.sum() > 16
    error = np.abs(got - x.astype(np.float64))[which] / 2.0**125
    assert error.max() <= (1 if codec.stochastic else 0.5) * (1 + 2.0**-20)


@pytest.mark.parametrize("scale", ROUNDED)
def test_random_rounding_is_unbiased_at_the_ends_too(scale):
    rng = np.random.default_rng(0)
    x = np.full((1024, 64), 0.3, np.float32)
    x[:, ::4] = rng.uniform(0.9, 1, (1024, 16))
    x[:, 1::4] = rng.uniform(0, 0.1, (1024, 16))

    def deviations(stochastic):
        """Means of the errors at the peaks, at the least values and between them, in the standard
        errors of a coin that is tossed for each.
        """
        # In one row, since equal pairs at one position of several rows are rounded alike.
        got, s, _ = round_trip(GroupedAsymmetric(64, scale, stochastic), x.ravel())
        steps = np.asarray(s, np.float64)[:, None]
        error = (np.asarray(got, np.float64).reshape(x.shape) - x) / steps
        peaks, least = x == x.max(-1, keepdims=True), x == x.min(-1, keepdims=True)
        of = peaks, least, x == np.float32(0.3), np.ones(x.shape, bool)
        return np.array([error[which].mean() * 2 * which.sum() ** 0.5 for which in of])

    assert (np.abs(deviations(True)) < 4).all()
    assert np.abs(deviations(False)[2]) > 4, "nearest rounding is biased here: the test can fail"
