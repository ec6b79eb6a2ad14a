"""GroupedAsymmetric covers the whole range of a group, peak and zeros included, and its scale is a
fifteenth of that range, whatever its offset is rounded to.
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

from jaxmem.codecs import GroupedAsymmetric

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
