"""How a value becomes one of the sixteen codes, and how a scale becomes a number that is stored."""

import math

import jax.numpy as jnp
from jax import lax

# of scales: a denormal, which may be flushed or not, is less than half of it, and its code 0
LEAST = 2.0**-125
LEAST_OFFSET = 2.0**-100  # whether or not denormals are flushed, they are nothing beside it
# of a scale whose products with codes are exact: what is added to one is then rounded once, fused
# or not
EXACT_DIGITS = 21


def wide_dtype(dtype):
    """What arithmetic on values of a floating `dtype` is done in: float32 at least."""
    return jnp.float64 if jnp.dtype(dtype).itemsize == 8 else jnp.float32


def greatest(x, axes):
    """The greatest |x| along `axes` (of none: 0), NaN where one is: among bits, NaN's are above all
    others'.

    XLA:CPU's own maximum drops some NaN.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.uint64 if x.dtype.itemsize == 8 else jnp.uint32)
    return lax.bitcast_convert_type(jnp.max(bits, axes, initial=0), x.dtype)


def scale_of(greatest, dtype, stochastic: bool, digits: int = 24):
    """The scale that is stored for a greatest |x|: an eighth of it, rounded up.

    A seventh where rounding is stochastic, since at an eighth the greatest value would be clipped,
    a bias. As a product, which XLA would make of the division anyhow.
    """
    return round_up(greatest * (1 / 7 if stochastic else 1 / 8), dtype, digits)


def round_up(scale, dtype, digits: int = 24):
    """The least number of `dtype` (bfloat16 or float32), of so many digits, that is not below
    `scale` (floating, >= 0).

    So every value lies within the levels of the scale that is stored. 0 below 2^-125; NaN where
    `scale` or the result is not finite.
    """
    mantissa = min(jnp.finfo(dtype).nmant, digits - 1)
    # XLA drops a pair of conversions; this it must do
    nearest = lax.reduce_precision(scale, 8, mantissa)
    bits = lax.bitcast_convert_type(nearest.astype(jnp.float32), jnp.uint32)
    bits = jnp.where(nearest < scale, bits + jnp.uint32(1 << (23 - mantissa)), bits)
    up = lax.bitcast_convert_type(bits, jnp.float32)
    up = jnp.where(scale < LEAST, 0.0, jnp.where(up < jnp.inf, up, jnp.nan))
    return up.astype(dtype)


def inverse(scale):
    """1 / s, and 0 for a scale of zero or NaN. Values are multiplied by it: a division each would
    cost a GPU more than the memory's speed allows."""
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def round_stochastic(y, x):
    """`y` in [-8, 7] to an integer next to it, float32, up with the probability of its fraction:
    floor(y + u), to 2^-16.

    u in [0, 1) is 16 bits for each of the two values of `x` (*lead, K, 2, H) that share a byte,
    hashed from both values' own bits and the byte's index in its row: the same row gives the same
    numbers, in a recomputation, under `vmap` and on whichever device it lies. An integer stays the
    integer it is.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    row = (*bits.shape[-3:-2], bits.shape[-1])
    index = lax.iota(jnp.uint32, math.prod(row)).reshape(row)
    h = (
        bits[..., 0, :] * jnp.uint32(0xCC9E2D51)
        + bits[..., 1, :] * jnp.uint32(0x1B873593)
        + index * jnp.uint32(0x9E3779B9)
    )
    h = (h ^ (h >> 15)) * jnp.uint32(0x85EBCA6B)
    h = h ^ (h >> 16)
    u = jnp.stack([h & 0xFFFF, h >> 16], -2).astype(jnp.float32) * 2.0**-16
    # beside 192, sums have 16 bits after the point
    return jnp.floor(y.astype(jnp.float32) + (u + 192)) - 192
