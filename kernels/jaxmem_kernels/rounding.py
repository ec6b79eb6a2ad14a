"""How a value becomes one of the sixteen codes, and how a scale becomes a number that is stored."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

LEAST = float(jnp.finfo(jnp.float32).tiny)


class Rounding(NamedTuple):
    """`codes(y, x)` rounds `y` (in scales) to integers; `x`, the values themselves, seed what is random.

    `levels`: the greatest |x| of a group is this many scales.
    """

    levels: int
    codes: Callable


def round_up(scale, dtype):
    """The least number of `dtype` (bfloat16 or float32) that is not below `scale` (floating, any shape, >= 0).

    So every value lies within the levels of the scale that is stored. 0 below float32's least normal number, 2^-126,
    whether or not denormals are flushed; NaN where `scale` or the result is not finite.
    """
    mantissa = jnp.finfo(dtype).nmant
    nearest = lax.reduce_precision(scale, 8, mantissa)  # XLA drops a pair of conversions; this it must do
    bits = lax.bitcast_convert_type(nearest.astype(jnp.float32), jnp.uint32)
    bits = jnp.where(nearest < scale, bits + jnp.uint32(1 << (23 - mantissa)), bits)
    up = lax.bitcast_convert_type(bits, jnp.float32)
    up = jnp.where(scale < LEAST, 0.0, jnp.where(up < jnp.inf, up, jnp.nan))
    return up.astype(dtype)


def _mix(h):
    """MurmurHash3's finalizer, on uint32."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def uniform(x):
    """float32 in [0, 1) for each of `x` (R, P, H), hashed from its row's bits and its own index.

    The same `x` gives the same numbers, so that recomputation repeats them.
    """
    index = lax.iota(jnp.uint32, x.size).reshape(x.shape) * jnp.uint32(0x9E3779B9)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    row = jnp.sum(_mix(bits + index), (1, 2), keepdims=True, dtype=jnp.uint32)
    return (_mix(_mix(index + jnp.uint32(0x7F4A7C15)) ^ row) >> 8).astype(jnp.float32) * 2.0**-24


def _stochastic(y, x):
    floor = jnp.floor(y)
    return jnp.where(uniform(x).astype(y.dtype) < y - floor, floor + 1, floor)


NEAREST = Rounding(8, lambda y, x: jnp.round(y))
STOCHASTIC = Rounding(7, _stochastic)  # by 7: at 8 the greatest value would be clipped, a bias
