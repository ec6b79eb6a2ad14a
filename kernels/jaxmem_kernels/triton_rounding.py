"""Rounds in Triton as `rounding` does, to the last bit."""

import triton
import triton.language as tl

# The first two are those of `rounding`; a kernel may read no globals but constexprs.
LEAST = tl.constexpr(2.0**-125)
LEAST_OFFSET = tl.constexpr(2.0**-100)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)


@triton.jit
def greatest_of(low, high):
    """Returns (R,), the greatest |x| in each row of two (R, H), NaN where one is: as integers,
    NaN's bits are above all others.
    """
    a, b = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.maximum(a, b), 1).to(tl.float32, bitcast=True)


@triton.jit
def rounded_up(greatest, SHARE: tl.constexpr, BELOW: tl.constexpr):
    """`scale_of`: the scale that is stored for a greatest |x|.

    SHARE: which share of it the scale is.
    BELOW: a mask of float32's lowest bits, those that are not stored.
    """
    exact = greatest * SHARE
    # As integers: adding the mask carries into the stored bits unless those below are all 0.
    up = ((exact.to(tl.int32, bitcast=True) + BELOW) & (-1 - BELOW)).to(tl.float32, bitcast=True)
    finite = (exact < float("inf")) & (up < float("inf"))
    return tl.where(exact < LEAST, 0.0, tl.where(finite, up, float("nan")))


@triton.jit
def rounded_offset(exact, BF16: tl.constexpr):
    """The offset that is stored for a finite one. BF16: it is stored as bfloat16, else float32."""
    limit: tl.constexpr = LARGEST_BF16 if BF16 else LARGEST
    near = tl.minimum(tl.maximum(exact, -limit), limit)
    if BF16:
        # To the nearest of the upper 16 bits, and in a tie to the even one.
        bits = near.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(near) < LEAST_OFFSET, 0.0, near)


@triton.jit
def noise(low, high, index):
    """Returns 192 + u for the low and for the high value of each byte, as
    `rounding.round_stochastic` adds them.

    index: the byte's index in its row.
    """
    a, b = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    h = a * 0xCC9E2D51 + b * 0x1B873593 + index.to(tl.uint32) * 0x9E3779B9
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    h = h ^ (h >> 16)
    # 0x43400000 is 192 as a float32, whose lowest 16 bits are worth 2^-16 and up.
    of_low, of_high = (h & 0xFFFF) | 0x43400000, (h >> 16) | 0x43400000
    return of_low.to(tl.float32, bitcast=True), of_high.to(tl.float32, bitcast=True)
