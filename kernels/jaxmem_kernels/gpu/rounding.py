"""Rounds in Triton as `jaxmem_kernels.rounding` does, to the last bit."""

import triton
import triton.language as tl

from jaxmem_kernels import rounding

# A kernel may read no globals but constexprs.
LEAST = tl.constexpr(rounding.LEAST)
LEAST_OFFSET = tl.constexpr(rounding.LEAST_OFFSET)
# A mask of float32's lowest bits, which are 0 in numbers of EXACT_DIGITS.
SPARE = tl.constexpr((1 << (24 - rounding.EXACT_DIGITS)) - 1)
STEP_OF_HALF = tl.constexpr(rounding.STEP_OF_HALF)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)


@triton.jit
def greatest_of(low, high):
    """Returns the greatest |x| (R,) of each row of `low` and `high` (R, H): NaN if a value is NaN.
    As integers, the bits of NaN are above all others.
    """
    a, b = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.maximum(a, b), 1).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(greatest, STOCHASTIC: tl.constexpr, BF16: tl.constexpr):
    """`rounding.scale_of`. BF16: the scale is stored as bfloat16, else float32."""
    return _rounded_up(greatest * (1 / 7 if STOCHASTIC else 1 / 8), BF16, 0)


@triton.jit
def offset_of(high, low, BF16: tl.constexpr):
    """`rounding.offset_of`. BF16: the offset is stored as bfloat16, else float32."""
    step = _rounded_up((high * 0.5 - low * 0.5) * STEP_OF_HALF, BF16, SPARE)
    limit: tl.constexpr = LARGEST_BF16 if BF16 else LARGEST
    near = tl.minimum(tl.maximum((low * 0.5 + step * 4) * 2, -limit), limit)
    if BF16:
        # Rounds to the upper 16 bits, to nearest, ties to even.
        bits = near.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    far = near * 0.5 - low * 0.5 > LARGEST * 0.5
    return tl.where((tl.abs(near) < LEAST_OFFSET) | far, 0.0, near)


@triton.jit
def scale_around_offset(offset, high, low, BF16: tl.constexpr):
    """`rounding.scale_around_offset`. BF16: the scale is stored as bfloat16, else float32."""
    above, below = (high * 0.5 - offset * 0.5) * (2 / 7), (offset * 0.5 - low * 0.5) * 0.25
    return _rounded_up(tl.maximum(above, below), BF16, SPARE)


@triton.jit
def _rounded_up(exact, BF16: tl.constexpr, UNUSED: tl.constexpr):
    """`rounding.round_up`. UNUSED: a mask of the lowest bits, which are 0 in a stored float32."""
    below: tl.constexpr = 0xFFFF if BF16 else UNUSED  # bfloat16 stores the upper 16 bits
    # As integers, adding the mask carries into the stored bits unless all lower bits are 0.
    up = ((exact.to(tl.int32, bitcast=True) + below) & (-1 - below)).to(tl.float32, bitcast=True)
    finite = (exact < float("inf")) & (up < float("inf"))
    return tl.where(exact < LEAST, 0.0, tl.where(finite, up, float("nan")))


@triton.jit
def noise(low, high, index, SALT: tl.constexpr):
    """Returns 192 + u for the low and for the high value of each byte, the terms that
    `rounding.round_stochastic` adds.

    index: the byte's index in its row.
    SALT: `rounding.salt_of` the seed.
    """
    a, b = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    h = a * 0xCC9E2D51 + b * 0x1B873593 + index.to(tl.uint32) * 0x9E3779B9 + SALT
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    h = h ^ (h >> 16)
    # 0x43400000 is the float32 192, whose lowest 16 bits have the values 2^-16 to 2^-1.
    of_low, of_high = (h & 0xFFFF) | 0x43400000, (h >> 16) | 0x43400000
    return of_low.to(tl.float32, bitcast=True), of_high.to(tl.float32, bitcast=True)
