"""Packs and unpacks bits on a TPU: the bodies of the kernels of `bits`. Blocks have the layout of
`encode`. Values are int8, 0 or 1, since a TPU's kernels do not support bools in memory.
"""

import functools
import operator

from jaxmem_kernels.tpu.tiles import Tiles


def pack(x, codes, *, tiles: Tiles):
    """`pack_bits` of values 0 and 1."""

    def tokens(at):
        for _, columns in tiles.each():
            parts = tiles.read(x, at, columns)
            packed = functools.reduce(operator.or_, (part << i for i, part in enumerate(parts)))
            tiles.put_bytes(codes, at, columns, packed)

    tiles.loop(tokens)


def unpack(codes, x, *, tiles: Tiles):
    """The inverse of `pack`."""

    def tokens(at):
        for _, columns in tiles.each():
            packed = tiles.bytes_of(codes, at, columns)
            parts = [(packed >> i) & 1 for i in range(8)]
            tiles.write(x, at, columns, tiles.joined(parts))

    tiles.loop(tokens)
