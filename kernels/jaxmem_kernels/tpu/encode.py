"""Encodes to INT4 on a TPU: the bodies of the kernels of `int4`.

All blocks but the blocks of rows have a first axis of length 1. Codes (bytes of a row, tokens) and
scales (groups, tokens) are stored transposed, as tiles are.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxmem_kernels.tpu import rounding
from jaxmem_kernels.tpu.tiles import LANES, Tiles

# 1.5 · 2^23. A float32 of this size has no fraction: adding SHIFT rounds to the nearest integer,
# which is then in the sum's lowest bits.
SHIFT = 12582912.0


def encode(x, codes, scales, kept, *, tiles: Tiles, scale: str, **how):
    """`quantize`.

    kept: scratch memory for the scales of 128 tokens, float32 (groups, 128).
    """
    _encode(lambda at, columns: tiles.read(x, at, columns), codes, scales, kept, tiles, scale, how)


def encode_without(x, taken, codes, scales, kept, *, tiles: Tiles, scale: str, **how):
    """`quantize_without`; taken: int32, 1 for channels that are replaced by zeros."""

    def read(at, columns):
        left_out = tiles.row(taken, columns) != 0
        return tiles.read(x, at, columns, lambda rows: jnp.where(left_out, 0.0, rows))

    _encode(read, codes, scales, kept, tiles, scale, how)


def encode_separated(
    channels, x, codes, scales, values, kept, turned, found, *, tiles: Tiles, scale: str, **how
):
    """`quantize_separated`.

    channels: the channel of each slot, int32 in scalar memory. The channel of an empty slot is in
      no block.
    values: (slots, tokens). The array remains in memory while the blocks of columns run one after
      the other.
    turned: scratch memory for 128 tokens, float32 (columns, 128).
    found: scratch memory for the slots' values at these tokens, float32 (slots, 128).
    """
    first = pl.program_id(2) * tiles.columns

    def take(at):
        for _, columns in tiles.each():
            turned[columns, :] = tiles.tile(x, at, columns)
        found[...] = jnp.where(first == 0, 0.0, tiles.tokens_of(values, at))
        for slot in range(found.shape[0]):
            channel = channels[slot] - first

            @pl.when((channel >= 0) & (channel < tiles.columns))
            def move(channel=channel, slot=slot):
                found[slot : slot + 1, :] = turned[pl.ds(channel, 1), :]
                turned[pl.ds(channel, 1), :] = jnp.zeros((1, LANES), jnp.float32)

        tiles.put(values, at, found[...])

    read = lambda _, columns: tiles.parted(turned[columns, :])
    _encode(read, codes, scales, kept, tiles, scale, how, take)


def encode_offset(x, codes, scales, offsets, kept, beside, *, tiles: Tiles, scale: str, **how):
    """`quantize_offset`; kept, beside: scratch memory for scales and for offsets."""
    first = pl.program_id(2) * (tiles.columns // 2)

    def tokens(at):
        for group, columns in tiles.each():
            low, high = tiles.read(x, at, columns)
            most = jnp.max(jnp.maximum(low, high), 1, keepdims=True)
            least = jnp.min(jnp.minimum(low, high), 1, keepdims=True)
            finite = rounding.greatest(low, high) < jnp.inf  # false for NaN too
            o = jnp.where(finite, rounding.offset_of(most, least, scale), jnp.nan)
            s = jnp.where(finite, rounding.scale_around_offset(o, most, least, scale), jnp.nan)
            by = rounding.inverse(s)
            # The random bits come from x itself.
            pair = (low - o) * by, (high - o) * by
            tiles.put_bytes(codes, at, columns, _packed(pair, (low, high), first, columns, **how))
            _keep(kept, group, s)
            _keep(beside, group, o)
        tiles.put(scales, at, kept[...])
        tiles.put(offsets, at, beside[...])

    tiles.loop(tokens)


def encode_by(x, scales, codes, *, tiles: Tiles, **how):
    """`quantize_by`; scales: float32, one for each value of a row."""
    by = lambda columns: rounding.inverse(tiles.row(scales, columns))
    _encode_by(x, by, codes, tiles, how)


def encode_channelwise(x, codes, scales, kept, *, tiles: Tiles, known: int, scale: str, **how):
    """`quantize_channelwise` of a block that has all values of its channels. The kernel passes over
    the values twice, and reads them from the device's memory once.

    scales: float32, one for each value of a row.
    kept: float32, of the shape of `scales`: the greatest values, and then the inverse scales.
    known: number of tokens; a block may have more.
    """
    kept[...] = jnp.zeros_like(kept)

    def look(at):
        for _, columns in tiles.each():
            most = tiles.greatest(x, at, columns, known)
            most = jnp.maximum(most, rounding.bits_of(tiles.row(kept, columns)))
            tiles.put_row(kept, columns, rounding.of_bits(most))

    tiles.loop(look)
    s = rounding.scale_of(kept[...], scale, how["stochastic"])
    scales[...] = s
    kept[...] = rounding.inverse(s)
    _encode_by(x, lambda columns: tiles.row(kept, columns), codes, tiles, how)


def _encode_by(x, by, codes, tiles: Tiles, how: dict) -> None:
    """Encodes the products of a tile's values and `by(columns)`."""
    first = pl.program_id(2) * (tiles.columns // 2)

    def tokens(at):
        for _, columns in tiles.each():
            pair = tiles.read(x, at, columns, functools.partial(jnp.multiply, by(columns)))
            values = tiles.read(x, at, columns) if how["stochastic"] else pair
            tiles.put_bytes(codes, at, columns, _packed(pair, values, first, columns, **how))

    tiles.loop(tokens)


def _encode(
    read, codes, scales, kept, tiles: Tiles, scale: str, how: dict, before=lambda tokens: None
) -> None:
    """Encodes the values `read(tokens, columns)` symmetrically. Calls `before(tokens)` first."""
    first = pl.program_id(2) * (tiles.columns // 2)

    def tokens(at):
        before(at)
        for group, columns in tiles.each():
            low, high = read(at, columns)
            s = rounding.scale_of(rounding.greatest(low, high), scale, how["stochastic"])
            by = rounding.inverse(s)
            packed = _packed((low * by, high * by), (low, high), first, columns, **how)
            tiles.put_bytes(codes, at, columns, packed)
            _keep(kept, group, s)
        tiles.put(scales, at, kept[...])

    tiles.loop(tokens)


def _keep(kept, group: int, found) -> None:
    """Stores the scales or offsets `found` of a tile's groups, (groups, 1, 128), in `kept`."""
    kept[group : group + found.shape[0], :] = found[:, 0]


def _packed(pair, values, first, columns: slice, *, stochastic: bool, seed: int = 0):
    """Rounds a pair of (groups, H, 128) and packs the codes into bytes, as int32. The random bits
    are a hash of `values` and of a byte's index in its row. `first` is the block's first index.

    After adding SHIFT, the integer is in the sum's lowest bits. After adding 192 + u, the floor is
    in the bits above the 16 bits of the fraction. Both constants are multiples of 16, so they do
    not change the four bits of a code.
    """
    low, high = (jnp.minimum(jnp.where(y >= -8, y, -8.0), 7.0) for y in pair)  # NaN is -8
    if stochastic:
        index = lax.broadcasted_iota(jnp.int32, low.shape, 0) * low.shape[1]
        index += lax.broadcasted_iota(jnp.int32, low.shape, 1) + first + columns.start // 2
        noise = rounding.noise(values[0], values[1], index, seed)
        low, high = (rounding.bits_of(y + n) >> 16 for y, n in zip((low, high), noise))
    else:
        low, high = rounding.bits_of(low + SHIFT), rounding.bits_of(high + SHIFT)
    return (low & 15) | ((high & 15) << 4)
