"""Rounds values to one of the sixteen codes, and scales to numbers that are stored.

Values are multiplied by the inverse of the scale. The alternative is to divide each value, which
takes a GPU longer than moving the value through memory. Scales that are stored with an offset have
21 bits (`EXACT_DIGITS`), so that scale × code is exact in float32. A fused multiply-add then has
the result of separate operations, and XLA and Triton agree bit for bit.

Asymmetric codes cover the range from end to end. Adacc's formula was the first choice. Its offset
is in the middle of the range and its step is a sixteenth of the range, but codes −8 to 7 have only
fifteen steps between them: the greatest value, a softmax's peak, lost a whole step. Here the offset
is eight fifteenths of the range above the least value. It is computed from a step that is rounded
already, so that products are exact before they are added.

NaN is looked for among bits (`greatest`), because XLA:CPU's maximum drops some NaNs.

A row's stochastic rounding depends on that row alone. The index of a value in the whole tensor was
the first choice. With that index, rounding would change under `vmap` and with a divided batch.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

# The least scale. Denormals, which hardware may flush or not, are less than half of it: their code
# is 0 either way.
LEAST = 2.0**-125
# The least offset. Denormals are negligible in comparison, whether or not they are flushed.
LEAST_OFFSET = 2.0**-100
# Binary digits of a scale that is stored with an offset. Its products with codes, of three digits,
# are exact in float32's 24 digits. A sum with such a product is rounded once, fused or not.
EXACT_DIGITS = 21
# A step as a fraction of half the range, 2/15. It is rounded up to a float32, for float64 too, so
# that 15 steps from a least value of 0 cover the greatest value: zeros then decode to 0.
STEP_OF_HALF = float(np.float32(2 / 15))


def wide_dtype(dtype):
    """Returns the dtype for arithmetic on values of a floating-point `dtype`: float32 at least."""
    return jnp.float64 if jnp.dtype(dtype).itemsize == 8 else jnp.float32


def greatest(x, axes):
    """Returns the greatest |x| along `axes`: NaN if a value is NaN, and 0 without values."""
    # The maximum of the bits, as integers: the bits of numbers >= 0 are ordered as the numbers, and
    # the bits of NaN are above all others.
    # Remove with a fix: XLA:CPU's own maximum drops some NaN (jax 0.10.2, 0.11.2 and 0.12.0.1).
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.uint64 if x.dtype.itemsize == 8 else jnp.uint32)
    return lax.bitcast_convert_type(jnp.max(bits, axes, initial=0), x.dtype)


def scale_of(greatest, dtype, stochastic: bool):
    """Returns the stored scale for a greatest |x|: an eighth of it, rounded up.

    For stochastic rounding the scale is a seventh: with an eighth, the greatest value would be
    clipped, which is a bias. The division is written as a product, since XLA would rewrite it so.
    """
    return round_up(greatest * (1 / 7 if stochastic else 1 / 8), dtype)


def round_up(scale, dtype, digits: int = 24):
    """Returns the least number of `dtype` (bfloat16 or float32) with `digits` binary digits that is
    not below `scale` (floating, >= 0).

    So every value is within the levels of the stored scale. The result is 0 for a scale below
    2^-125, and NaN if `scale` or the result is not finite.
    """
    mantissa = min(jnp.finfo(dtype).nmant, digits - 1)  # the first digit is not stored
    # XLA may drop a pair of conversions, but not `reduce_precision`. Both dtypes have 8 exponent
    # bits.
    nearest = lax.reduce_precision(scale, 8, mantissa)
    bits = lax.bitcast_convert_type(nearest.astype(jnp.float32), jnp.uint32)
    # If the number was rounded down, the last stored digit is increased by one.
    bits = jnp.where(nearest < scale, bits + jnp.uint32(1 << (23 - mantissa)), bits)
    up = lax.bitcast_convert_type(bits, jnp.float32)
    up = jnp.where(scale < LEAST, 0.0, jnp.where(up < jnp.inf, up, jnp.nan))
    return up.astype(dtype)


def offset_of(high, low, dtype):
    """Returns the stored offset for finite values from `low` to `high`, in the dtype of the values:
    eight steps above `low`. A step is a fifteenth of the range, rounded up as a scale is.

    The offset is rounded to the nearest number of `dtype` (bfloat16 or float32). It is 0 if it is
    tiny, or if its distance to `low` would be infinite.
    """
    # Halves, since the range may be infinite. Their products are exact or rounded by `round_up`
    # before they are added: a fused multiply-add has the same result.
    step = round_up((high / 2 - low / 2) * STEP_OF_HALF, dtype, EXACT_DIGITS).astype(low.dtype)
    limit = float(jnp.finfo(dtype).max)
    near = jnp.clip((low / 2 + 4 * step) * 2, -limit, limit)
    # As in `round_up`, XLA may not drop this rounding, as it may a pair of conversions.
    near = lax.reduce_precision(near, 8, jnp.finfo(dtype).nmant)
    far = near / 2 - low / 2 > float(jnp.finfo(low.dtype).max) / 2
    return jnp.where((jnp.abs(near) < LEAST_OFFSET) | far, 0, near)


def scale_around_offset(offset, high, low, dtype):
    """Returns the scale that is stored with a stored offset, of EXACT_DIGITS: the least scale with
    which codes -8 to 7 cover `low` to `high`.
    """
    above, below = (high / 2 - offset / 2) * (2 / 7), (offset / 2 - low / 2) / 4
    return round_up(jnp.maximum(above, below), dtype, EXACT_DIGITS)


def inverse(scale):
    """Returns 1 / s, and 0 for a scale that is zero or NaN. Values are multiplied by the inverse,
    since a GPU needs more time to divide a value than to move it through memory.
    """
    # The inner `where` avoids 1 / 0.
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def salt_of(seed: int) -> int:
    """Returns the 32 bits that a seed adds to the hash in `round_stochastic`: MurmurHash3's
    finalizer of the seed, which maps seeds one to one and 0 to 0.
    """
    h = seed
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * multiplier & 0xFFFFFFFF
    return h ^ (h >> 16)


def round_stochastic(y, x, seed: int = 0):
    """Rounds `y` in [-8, 7] to an integer next to it, as float32: up with the probability of its
    fraction, by floor(y + u), to 2^-16.

    u in [0, 1) is 16 bits for each of the two values of `x` (*lead, K, 2, H) that share a byte. The
    bits are a hash of both values' bits, of the byte's index in its row, and of `seed`. So a row
    has the same random numbers in a recomputation, under `vmap`, and on every device. An integer is
    not changed.

    The probability is over pairs of different bits, over the bytes of a row, and over seeds: over
    all 2^32 seeds, each u occurs equally often. With one seed, equal pairs at one position of their
    rows are rounded alike.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # (K, H), or (H,) without an axis of groups: an index for each byte of a row.
    row = (*bits.shape[-3:-2], bits.shape[-1])
    index = lax.iota(jnp.uint32, math.prod(row)).reshape(row)
    # Multipliers of MurmurHash3, and 2^32 over the golden ratio for the index.
    h = (
        bits[..., 0, :] * jnp.uint32(0xCC9E2D51)
        + bits[..., 1, :] * jnp.uint32(0x1B873593)
        + index * jnp.uint32(0x9E3779B9)
        + jnp.uint32(salt_of(seed))
    )
    h = (h ^ (h >> 15)) * jnp.uint32(0x85EBCA6B)
    h = h ^ (h >> 16)
    u = jnp.stack([h & 0xFFFF, h >> 16], -2).astype(jnp.float32) * 2.0**-16
    # Sums are in [128, 256), where float32 has 16 bits after the point: the kernel rounds alike.
    return jnp.floor(y.astype(jnp.float32) + (u + 192)) - 192
