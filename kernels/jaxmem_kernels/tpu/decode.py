"""Decodes INT4 on a TPU: the bodies of the kernels of `int4`.

Blocks have the layout of `encode`. `limit` is the greatest number of the result's dtype. A decoded
value can exceed it, since scales were rounded up.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxmem_kernels.tpu.tiles import Tiles


def decode(codes, scales, x, *, tiles: Tiles, limit: float):
    """`dequantize`."""

    def tokens(at):
        scale = _by_tile(scales, at, tiles)
        for group, columns in tiles.each():
            s = scale(group)
            low, high = _codes(codes, at, columns, tiles)
            values = tiles.joined([_limited(low * s, limit), _limited(high * s, limit)])
            tiles.write(x, at, columns, values)

    tiles.loop(tokens)


def decode_offset(codes, scales, offsets, x, *, tiles: Tiles, limit: float):
    """`dequantize_offset`."""

    def tokens(at):
        scale, offset = _by_tile(scales, at, tiles), _by_tile(offsets, at, tiles)
        for group, columns in tiles.each():
            # Halves, as in the reference: -8·s can overflow where the sum is finite.
            s, o = scale(group) * 0.5, offset(group) * 0.5
            pair = [(q * s + o) * 2 for q in _codes(codes, at, columns, tiles)]
            values = tiles.joined([_limited(x, limit) for x in pair])
            tiles.write(x, at, columns, values)

    tiles.loop(tokens)


def decode_with(channels, codes, scales, values, x, turned, *, tiles: Tiles, limit: float):
    """`dequantize_with`.

    channels: the channel of each slot, int32 in scalar memory; negative for an empty slot.
    values: (slots, tokens).
    turned: scratch memory for 128 decoded tokens, float32 (columns, 128).
    """
    first = pl.program_id(2) * tiles.columns

    def tokens(at):
        scale = _by_tile(scales, at, tiles)
        for group, columns in tiles.each():
            s = scale(group)
            low, high = _codes(codes, at, columns, tiles)
            turned[columns, :] = tiles.joined([_limited(low * s, limit), _limited(high * s, limit)])

        exact = tiles.tokens_of(values, at)
        for slot in range(values.shape[1]):
            channel = channels[slot] - first

            @pl.when((channel >= 0) & (channel < tiles.columns))
            def put(channel=channel, values=exact[slot : slot + 1]):
                turned[pl.ds(channel, 1), :] = values

        for _, columns in tiles.each():
            tiles.write(x, at, columns, turned[columns, :])

    tiles.loop(tokens)


def decode_by(codes, scales, x, *, tiles: Tiles, limit: float):
    """`dequantize_by`; scales: float32, one for each value of a row."""

    def tokens(at):
        for _, columns in tiles.each():
            values = tiles.joined(_codes(codes, at, columns, tiles))
            tiles.write(x, at, columns, values, _scaled(tiles.row(scales, columns), limit))

    tiles.loop(tokens)


def _codes(codes, at, columns: slice, tiles: Tiles):
    """Returns the codes in the low and the high four bits of a tile, float32 (groups, H, 128)."""
    packed = tiles.bytes_of(codes, at, columns)
    # Shifted up and down again, the four bits are a signed number.
    return [(packed << shift >> 28).astype(jnp.float32) for shift in (28, 24)]


def _by_tile(numbers, at, tiles: Tiles):
    """Returns a function of a tile's first group, which returns the scales or offsets of the tile's
    groups, float32 (groups, 1, 128).
    """
    found = tiles.tokens_of(numbers, at)
    return lambda group: found[group : group + tiles.chunk // tiles.group][:, None]


def _scaled(by, limit: float):
    """Returns the function that scales codes by the scales of channels."""
    return lambda rows: _limited(rows * by, limit)


def _limited(x, limit: float):
    """Clips x to ±limit. NaN remains NaN."""
    return jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x))
