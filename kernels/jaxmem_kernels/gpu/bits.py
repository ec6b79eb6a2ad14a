"""Packs and unpacks bits in Triton, as `jaxmem_kernels.bits` does. Only `launch` imports this
file.
"""

import triton
import triton.language as tl


@triton.jit
def pack(x, zero, n, codes, G: tl.constexpr, R: tl.constexpr, RAGGED: tl.constexpr):
    """`pack_bits` of n values. A program packs R groups of G = 8 H values; R and G are powers of
    two.

    RAGGED: `x` is flat, and its last group is short.
    """
    H: tl.constexpr = G // 8
    first = tl.program_id(0).to(tl.int64) * R  # first group; 64 bits, since n may exceed 2^31
    r, h = tl.arange(0, R)[:, None], tl.arange(0, H)[None, :]
    # The address of the program's first value, and the number of values from there to the end.
    start, left = x + first * G, n - first * G
    nothing = tl.load(zero)
    packed = tl.zeros((R, H), tl.int32)
    if RAGGED:
        if left < R * G:  # the last program reads the last value in place of missing values
            for i in tl.static_range(8):
                value = tl.load(start + tl.minimum(r * G + i * H + h, (left - 1).to(tl.int32)))
                packed |= (value != nothing).to(tl.int32) << i
        else:  # all other programs need no bounds
            for i in tl.static_range(8):
                packed |= (tl.load(start + r * G + i * H + h) != nothing).to(tl.int32) << i
    else:
        for i in tl.static_range(8):
            value = tl.load(start + r * G + i * H + h, mask=r < left // G, other=0)
            packed |= (value != nothing).to(tl.int32) << i
    tl.store(codes + first * H + r * H + h, packed.to(tl.uint8), mask=r < tl.cdiv(n, G) - first)


@triton.jit
def unpack(codes, zero, one, n, x, G: tl.constexpr, R: tl.constexpr, RAGGED: tl.constexpr):
    """`unpack_bits` of n values, with the tiles of `pack`."""
    H: tl.constexpr = G // 8
    first = tl.program_id(0).to(tl.int64) * R
    r, h = tl.arange(0, R)[:, None], tl.arange(0, H)[None, :]
    start, left = x + first * G, n - first * G
    there = r < tl.cdiv(n, G) - first
    packed = tl.load(codes + first * H + r * H + h, mask=there, other=0).to(tl.int32)
    nothing, something = tl.load(zero), tl.load(one)
    for i in tl.static_range(8):
        value = tl.where(((packed >> i) & 1) != 0, something, nothing)
        if RAGGED:
            tl.store(start + r * G + i * H + h, value, mask=r * G + i * H + h < left)
        else:
            tl.store(start + r * G + i * H + h, value, mask=there)
