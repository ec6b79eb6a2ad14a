"""INT4 encoding and decoding in Triton. Results equal `jaxmem_kernels.int4` to the last bit.
Only `launch` imports this file.

A program has R groups of G = 2 H values; R and G are powers of two. It has two tiles (R, H): `low`
are the first halves of the groups, whose codes are the low bits of bytes, and `high` the second
halves. So a thread loads, packs and stores 16 adjacent bytes at a time, and few threads share a
group's scale.

All kernels share these names. n is the number of values of the tensor. `first` is the index of a
program's first group (64 bits, since n may exceed 2^31). r and h are indices within a tile. `there`
masks places beyond the tensor. A read beyond the tensor gives 0, or the last value if the tensor is
flat and its last group is short.
"""

import triton
import triton.language as tl

from jaxmem_kernels.gpu.rounding import greatest_of, noise, offset_of, scale_around_offset, scale_of

# 1.5 · 2^23. A float32 of this size has no fraction: adding SHIFT rounds to the nearest integer,
# which is then in the sum's lowest bits.
SHIFT = tl.constexpr(12582912.0)


@triton.jit
def encode(
    x,
    n,
    codes,
    scales,
    K: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SALT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """`quantize`. K: number of groups of a row. SALT: `rounding.salt_of` the seed. RAGGED: `x` is
    flat, and its last group is short.
    """
    first = tl.program_id(0).to(tl.int64) * R
    low, high = _halves(x, n, first, G, R, RAGGED)
    s = scale_of(greatest_of(low, high), STOCHASTIC, scales.dtype.element_ty == tl.bfloat16)
    _encode(low, high, low, high, s, n, first, codes, scales, K, G, R, STOCHASTIC, SALT)


@triton.jit
def encode_offset(
    x,
    n,
    codes,
    scales,
    offsets,
    K: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SALT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """`quantize_offset`."""
    first = tl.program_id(0).to(tl.int64) * R
    low, high = _halves(x, n, first, G, R, RAGGED)
    most, least = tl.max(tl.maximum(low, high), 1), tl.min(tl.minimum(low, high), 1)
    finite = greatest_of(low, high) < float("inf")  # false for NaN too
    BF16: tl.constexpr = offsets.dtype.element_ty == tl.bfloat16
    offset = tl.where(finite, offset_of(most, least, BF16), float("nan"))
    s = tl.where(finite, scale_around_offset(offset, most, least, BF16), float("nan"))
    r, o = tl.arange(0, R), offset[:, None]
    tl.store(
        offsets + first + r, offset.to(offsets.dtype.element_ty), mask=r < tl.cdiv(n, G) - first
    )
    # The random bits come from x itself.
    _encode(low - o, high - o, low, high, s, n, first, codes, scales, K, G, R, STOCHASTIC, SALT)


@triton.jit
def encode_without(
    x,
    taken,
    n,
    codes,
    scales,
    C: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SALT: tl.constexpr,
):
    """`quantize_without`. C: number of channels, a multiple of G. `taken` has a byte for each
    channel.
    """
    first = tl.program_id(0).to(tl.int64) * R
    low, high = _halves(x, n, first, G, R, False)
    r, h = tl.arange(0, R)[:, None], tl.arange(0, G // 2)[None, :]
    # G times the group's index among the C / G groups of a row, plus the index in the low half.
    channel = ((first % (C // G)).to(tl.int32) + r) % (C // G) * G + h
    low = tl.where(tl.load(taken + channel) != 0, 0.0, low)
    high = tl.where(tl.load(taken + channel + G // 2) != 0, 0.0, high)
    s = scale_of(greatest_of(low, high), STOCHASTIC, scales.dtype.element_ty == tl.bfloat16)
    _encode(low, high, low, high, s, n, first, codes, scales, C // G, G, R, STOCHASTIC, SALT)


@triton.jit
def encode_by(
    x,
    scales,
    n,
    codes,
    W: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SALT: tl.constexpr,
):
    """`quantize_by` with one scale for each of W channels. A program encodes one group of channels
    in R rows.
    """
    # Adjacent programs encode the groups of channels of the same R rows.
    row, group = (tl.program_id(0) // (W // G)).to(tl.int64) * R, tl.program_id(0) % (W // G)
    H: tl.constexpr = G // 2
    r, h = tl.arange(0, R)[:, None], tl.arange(0, H)[None, :]
    there, start = r < n // W - row, x + row * W + group * G
    low = tl.load(start + r * W + h, mask=there, other=0).to(tl.float32)
    high = tl.load(start + r * W + H + h, mask=there, other=0).to(tl.float32)
    # Each column has one scale, which all rows of the tile share.
    by_low = _inverse(tl.load(scales + group * G + tl.arange(0, H)).to(tl.float32))[None, :]
    by_high = _inverse(tl.load(scales + group * G + H + tl.arange(0, H)).to(tl.float32))[None, :]
    packed = _packed(low * by_low, high * by_high, low, high, group * H + h, STOCHASTIC, SALT)
    tl.store(codes + row * (W // 2) + group * H + r * (W // 2) + h, packed, mask=there)


@triton.jit
def decode(
    codes, scales, n, x, G: tl.constexpr, R: tl.constexpr, LIMIT: tl.constexpr, RAGGED: tl.constexpr
):
    """`dequantize`. LIMIT: the greatest number of `x`'s dtype."""
    first = tl.program_id(0).to(tl.int64) * R
    low, high = _decoded(codes, scales, n, first, G, R)
    _store(x, _limited(low, LIMIT), _limited(high, LIMIT), n, first, G, R, RAGGED)


@triton.jit
def decode_offset(
    codes,
    scales,
    offsets,
    n,
    x,
    G: tl.constexpr,
    R: tl.constexpr,
    LIMIT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """`dequantize_offset`."""
    first = tl.program_id(0).to(tl.int64) * R
    # Halves, as in the reference: -8·s can overflow where the sum is finite.
    low, high = _decoded(codes, scales, n, first, G, R, 0.5)
    r = tl.arange(0, R)
    o = tl.load(offsets + first + r, mask=r < tl.cdiv(n, G) - first, other=0).to(tl.float32)
    half = o[:, None] * 0.5
    low, high = _limited((low + half) * 2, LIMIT), _limited((high + half) * 2, LIMIT)
    _store(x, low, high, n, first, G, R, RAGGED)


@triton.jit
def decode_with(
    codes,
    scales,
    values,
    slots,
    n,
    x,
    S: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """`dequantize_with`. S: number of slots. C: number of channels, a multiple of G. `slots` has a
    byte for each channel: 0 for a channel without a slot, else the number of its slot plus one.
    """
    first = tl.program_id(0).to(tl.int64) * R
    low, high = _decoded(codes, scales, n, first, G, R)
    r, h = tl.arange(0, R)[:, None], tl.arange(0, G // 2)[None, :]
    channel = ((first % (C // G)).to(tl.int32) + r) % (C // G) * G + h
    # `values` is (tokens, S): a token's C channels are C / G groups.
    there, token = r < tl.cdiv(n, G) - first, (first + r) // (C // G)
    for_low = tl.load(slots + channel).to(tl.int32)
    for_high = tl.load(slots + channel + G // 2).to(tl.int32)
    exact_low = tl.load(values + token * S + for_low - 1, mask=there & (for_low > 0), other=0).to(
        tl.float32
    )
    exact_high = tl.load(
        values + token * S + for_high - 1, mask=there & (for_high > 0), other=0
    ).to(tl.float32)
    low = tl.where(for_low > 0, exact_low, _limited(low, LIMIT))
    high = tl.where(for_high > 0, exact_high, _limited(high, LIMIT))
    _store(x, low, high, n, first, G, R, False)


@triton.jit
def decode_by(
    codes, scales, n, x, W: tl.constexpr, G: tl.constexpr, R: tl.constexpr, LIMIT: tl.constexpr
):
    """`dequantize_by` with one scale for each of W channels. A program decodes one group of
    channels in R rows.
    """
    row, group = (tl.program_id(0) // (W // G)).to(tl.int64) * R, tl.program_id(0) % (W // G)
    H: tl.constexpr = G // 2
    r, h = tl.arange(0, R)[:, None], tl.arange(0, H)[None, :]
    there = r < n // W - row
    packed = tl.load(codes + row * (W // 2) + group * H + r * (W // 2) + h, mask=there, other=0).to(
        tl.int32
    )
    low, high = _unpacked(packed)
    low *= tl.load(scales + group * G + h).to(tl.float32)
    high *= tl.load(scales + group * G + H + h).to(tl.float32)
    start = x + row * W + group * G
    tl.store(start + r * W + h, _limited(low, LIMIT).to(x.dtype.element_ty), mask=there)
    tl.store(start + r * W + H + h, _limited(high, LIMIT).to(x.dtype.element_ty), mask=there)


@triton.jit
def _halves(x, n, first, G: tl.constexpr, R: tl.constexpr, RAGGED: tl.constexpr):
    """Loads the first halves and the second halves of the groups from `first` on, each float32
    (R, H). If the last group is short, the last of the `n` values fills it.
    """
    H: tl.constexpr = G // 2
    at = tl.arange(0, R)[:, None] * G + tl.arange(0, H)[None, :]
    start, left = x + first * G, n - first * G
    if RAGGED:
        if left < R * G:  # the last program; the others need no bounds
            last = (left - 1).to(tl.int32)
            low, high = (
                tl.load(start + tl.minimum(at, last)),
                tl.load(start + tl.minimum(at + H, last)),
            )
        else:
            low, high = tl.load(start + at), tl.load(start + at + H)
    else:
        there = tl.arange(0, R)[:, None] < left // G
        low, high = (
            tl.load(start + at, mask=there, other=0),
            tl.load(start + at + H, mask=there, other=0),
        )
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _encode(
    y_low,
    y_high,
    low,
    high,
    s,
    n,
    first,
    codes,
    scales,
    K: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SALT: tl.constexpr,
):
    """Stores the scales, and the codes of the tiles `y_low` and `y_high` (R, H) by these scales.

    low, high: the tiles of the values of `x`. Random bits are hashes of these values.
    s: (R,), the rounded scale of each group.
    K: number of groups of a row.
    """
    H: tl.constexpr = G // 2
    by = _inverse(s)[:, None]
    r, h = tl.arange(0, R), tl.arange(0, H)
    at = r[:, None] * H + h[None, :]
    # The index of each byte in its row, as in `round_stochastic`.
    index = (((first % K).to(tl.int32) + r) % K)[:, None] * H + h[None, :]
    packed = _packed(y_low * by, y_high * by, low, high, index, STOCHASTIC, SALT)
    there = r < tl.cdiv(n, G) - first
    tl.store(codes + first * H + at, packed, mask=there[:, None])
    tl.store(scales + first + r, s.to(scales.dtype.element_ty), mask=there)


@triton.jit
def _inverse(scale):
    """`rounding.inverse`. Triton's `/` is approximate; `div_rn` rounds as the reference does."""
    return tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def _packed(y_low, y_high, low, high, index, STOCHASTIC: tl.constexpr, SALT: tl.constexpr):
    """Rounds y and packs the codes into bytes.

    After adding SHIFT, the integer is in the sum's lowest bits. After adding 192 + u, the floor is
    in the bits above the 16 bits of the fraction. Both constants are multiples of 16, so they do
    not change the four bits of a code.
    """
    y_low, y_high = _clipped(y_low), _clipped(y_high)
    if STOCHASTIC:
        noise_low, noise_high = noise(low, high, index, SALT)
        a = (y_low + noise_low).to(tl.int32, bitcast=True) >> 16
        b = (y_high + noise_high).to(tl.int32, bitcast=True) >> 16
    else:
        a, b = (
            (y_low + SHIFT).to(tl.int32, bitcast=True),
            (y_high + SHIFT).to(tl.int32, bitcast=True),
        )
    return ((a & 15) | (b << 4)).to(tl.uint8)


@triton.jit
def _clipped(y):
    return tl.minimum(tl.maximum(y, -8.0), 7.0)  # in this order NaN is -8


@triton.jit
def _decoded(codes, scales, n, first, G: tl.constexpr, R: tl.constexpr, FACTOR: tl.constexpr = 1.0):
    """Returns q·s·FACTOR of the groups from `first` on: both halves, each float32 (R, H)."""
    H: tl.constexpr = G // 2
    r = tl.arange(0, R)
    at, there = r[:, None] * H + tl.arange(0, H)[None, :], r < tl.cdiv(n, G) - first
    low, high = _unpacked(
        tl.load(codes + first * H + at, mask=there[:, None], other=0).to(tl.int32)
    )
    s = tl.load(scales + first + r, mask=there, other=0).to(tl.float32)[:, None] * FACTOR
    return low * s, high * s


@triton.jit
def _unpacked(packed):
    """Returns the codes in the low and in the high four bits as float32.

    The four bits become the lowest bits of the float32 2^23 (0x4B000000), without a conversion.
    `^ 8` makes them code + 8, and 8388616 is 2^23 + 8.
    """
    low = ((packed & 15) ^ 0x4B000008).to(tl.float32, bitcast=True) - 8388616.0
    return low, ((packed >> 4) ^ 0x4B000008).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _limited(x, LIMIT: tl.constexpr):
    """Clips x to ±LIMIT. Decoded values can exceed LIMIT, since scales were rounded up. NaN remains
    NaN.
    """
    return tl.minimum(tl.maximum(x, -LIMIT, tl.PropagateNan.ALL), LIMIT, tl.PropagateNan.ALL)


@triton.jit
def _store(x, low, high, n, first, G: tl.constexpr, R: tl.constexpr, RAGGED: tl.constexpr):
    """Stores both halves of the groups from `first` on, but nothing after the last value."""
    H: tl.constexpr = G // 2
    at = tl.arange(0, R)[:, None] * G + tl.arange(0, H)[None, :]
    start, left = x + first * G, n - first * G
    low, high = low.to(x.dtype.element_ty), high.to(x.dtype.element_ty)
    if RAGGED:
        if left < R * G:
            tl.store(start + at, low, mask=at < left)
            tl.store(start + at + H, high, mask=at + H < left)
        else:
            tl.store(start + at, low)
            tl.store(start + at + H, high)
    else:
        there = tl.arange(0, R)[:, None] < left // G
        tl.store(start + at, low, mask=there)
        tl.store(start + at + H, high, mask=there)
