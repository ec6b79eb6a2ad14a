"""Rounds inside a TPU kernel as `jaxmem_kernels.rounding` does, to the last bit.

All arrays are float32, and their bits int32: a TPU's vectors have 32 bits, and Mosaic supports
int32 best. Signed integers wrap around as unsigned integers do, so hashes are equal.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem_kernels.rounding import EXACT_DIGITS, LEAST, LEAST_OFFSET, STEP_OF_HALF, salt_of

# A mask of float32's lowest bits, which are 0 in numbers of EXACT_DIGITS.
SPARE = (1 << (24 - EXACT_DIGITS)) - 1
LARGEST = float(jnp.finfo(jnp.float32).max)


def bits_of(x) -> jax.Array:
    """The bits of float32 values, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def of_bits(bits) -> jax.Array:
    """The float32 values of int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def greatest(low, high):
    """`rounding.greatest` of groups with the halves `low` and `high` (groups, H, 128); the result
    is (groups, 1, 128). As integers, the bits of NaN are above all others.
    """
    bits = jnp.maximum(bits_of(low) & 0x7FFFFFFF, bits_of(high) & 0x7FFFFFFF)
    return of_bits(jnp.max(bits, 1, keepdims=True))


def scale_of(greatest, scale: str, stochastic: bool):
    """`rounding.scale_of`, as float32."""
    return _rounded_up(greatest * (1 / 7 if stochastic else 1 / 8), scale, 0)


def offset_of(high, low, scale: str):
    """`rounding.offset_of`."""
    step = _rounded_up((high * 0.5 - low * 0.5) * STEP_OF_HALF, scale, SPARE)
    limit = float(jnp.finfo(scale).max)
    near = jnp.minimum(jnp.maximum((low * 0.5 + step * 4) * 2, -limit), limit)
    if scale == "bfloat16":
        # Rounds to the upper 16 bits, to nearest, ties to even.
        bits = bits_of(near)
        near = of_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
    far = near * 0.5 - low * 0.5 > LARGEST * 0.5
    return jnp.where((jnp.abs(near) < LEAST_OFFSET) | far, 0.0, near)


def scale_around_offset(offset, high, low, scale: str):
    """`rounding.scale_around_offset`, as float32."""
    above, below = (high * 0.5 - offset * 0.5) * (2 / 7), (offset * 0.5 - low * 0.5) * 0.25
    return _rounded_up(jnp.maximum(above, below), scale, SPARE)


def inverse(scale):
    """`rounding.inverse`."""
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1.0), 0.0)


def noise(low, high, index, seed: int):
    """Returns 192 + u for the low and for the high value of each byte, the terms that
    `rounding.round_stochastic` adds.

    index: the byte's index in its row, int32.
    """
    h = (
        bits_of(low) * _int32(0xCC9E2D51)
        + bits_of(high) * _int32(0x1B873593)
        + index * _int32(0x9E3779B9)
        + _int32(salt_of(seed))
    )
    h = (h ^ lax.shift_right_logical(h, jnp.full_like(h, 15))) * _int32(0x85EBCA6B)
    h = h ^ lax.shift_right_logical(h, jnp.full_like(h, 16))
    # 0x43400000 is the float32 192, whose lowest 16 bits have the values 2^-16 to 2^-1.
    above = lax.shift_right_logical(h, jnp.full_like(h, 16))
    return of_bits((h & 0xFFFF) | 0x43400000), of_bits(above | 0x43400000)


def _rounded_up(exact, scale: str, unused: int):
    """`rounding.round_up`. unused: a mask of the lowest bits, which are 0 in a stored float32."""
    below = 0xFFFF if scale == "bfloat16" else unused  # bfloat16 stores the upper 16 bits
    # As integers, adding the mask carries into the stored bits unless all lower bits are 0.
    up = of_bits((bits_of(exact) + below) & (-1 - below))
    finite = (exact < jnp.inf) & (up < jnp.inf)
    return jnp.where(exact < LEAST, 0.0, jnp.where(finite, up, jnp.nan))


def _int32(number: int):
    """The int32 of a number's 32 bits."""
    return jnp.int32(number - (1 << 32) if number >= 1 << 31 else number)
