"""Divides a block of an array into tiles for a TPU's vectors."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128


class Tiles(NamedTuple):
    """The tiles of a block of tokens and columns, and their positions in arrays.

    A tile is `chunk` columns of 128 tokens, transposed: tokens run along a vector's lanes, and a
    row's values along its sublanes. The parts of a group are then whole vectors, and neither a
    group's greatest value nor its packing moves values between lanes.

    parts: number of values that share a byte.
    group: number of values that share a scale.
    batch: number of sets of tokens of a block.
    tokens: number of tokens of a set in a block.
    columns: number of values of a row in a block.
    chunk: number of columns of a tile.
    turned: whether the last axis of the array in memory is the axis of tokens, as in narrow arrays.
    """

    parts: int
    group: int
    batch: int
    tokens: int
    columns: int
    chunk: int
    turned: bool

    def each(self) -> Iterator[tuple[int, slice]]:
        """Yields a tile's first group and its columns."""
        for start in range(0, self.columns, self.chunk):
            yield start // self.group, slice(start, start + self.chunk)

    def loop(self, body) -> None:
        """Calls `body(at)` for every 128 tokens of the block. `at` is the position of the tokens,
        an argument of the other methods.
        """
        tiles = self.tokens // LANES

        # Not `//`: the lowering of its sign handling differs between TPUs, and a program may be
        # lowered for an absent TPU.
        def step(i, carry):
            batch, tile = lax.div(i, jnp.int32(tiles)), lax.rem(i, jnp.int32(tiles))
            body((batch, pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)))
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(self.batch * tiles), step, 0)

    def read(self, x, at, columns: slice, change=lambda rows: rows) -> list[jax.Array]:
        """Returns the parts of a tile's groups, each (groups, group / parts, 128), of 32 bits.

        x: (batch, tokens, columns), or (batch, columns, tokens) if it is turned.
        change: a function of the values before they are transposed. They broadcast with `row`.
        """
        return self.parted(self.tile(x, at, columns, change))

    def tile(self, x, at, columns: slice, change=lambda rows: rows) -> jax.Array:
        """Returns the values (columns, 128) of a tile, of 32 bits, as `read` does."""
        batch, tokens = at
        if self.turned:
            return change(_wide(x[batch, columns, tokens]))
        return change(_wide(x[batch, tokens, columns])).T

    def parted(self, values) -> list[jax.Array]:
        """Returns the parts of the groups of a tile's values (columns, 128)."""
        each = self.group // self.parts
        groups = values.reshape(values.shape[0] // self.group, self.parts, each, LANES)
        return [groups[:, i] for i in range(self.parts)]

    def joined(self, parts) -> jax.Array:
        """Returns the values (columns, 128) of a tile from the parts that `read` returned."""
        return jnp.stack(parts, 1).reshape(-1, LANES)

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of a row, an array with a number for each column of the block."""
        return (self.columns, 1) if self.turned else (1, self.columns)

    def row(self, row, columns: slice):
        """Returns the numbers of a tile's columns from a row (1, columns), or (columns, 1) if it is
        turned. They broadcast with the argument of `change`.
        """
        return row[self._of_row(columns)]

    def put_row(self, row, columns: slice, found) -> None:
        """Writes the numbers that `row` reads."""
        row[self._of_row(columns)] = found

    def greatest(self, x, at, columns: slice, known: int):
        """Returns the bits of the greatest |x| of each column of a tile, int32, in the shape of
        `row`. The bits of NaN are above all others.

        known: number of tokens of the array. The memory of a block beyond them is undefined.
        """
        batch, tokens = at
        over = 1 if self.turned else 0
        rows = x[batch, columns, tokens] if self.turned else x[batch, tokens, columns]
        bits = lax.bitcast_convert_type(_wide(rows), jnp.int32) & 0x7FFFFFFF
        if known % LANES:
            index = lax.broadcasted_iota(jnp.int32, bits.shape, over) + tokens.start
            bits = jnp.where(index < known, bits, 0)
        return jnp.max(bits, over, keepdims=True)

    def write(self, x, at, columns: slice, values, change=lambda rows: rows) -> None:
        """Writes `change(values)` of values (columns, 128) in `x`'s dtype to the position that
        `read` reads.
        """
        batch, tokens = at
        if self.turned:
            x[batch, columns, tokens] = change(values).astype(x.dtype)
        else:
            x[batch, tokens, columns] = change(values.T).astype(x.dtype)

    def bytes_of(self, codes, at, columns: slice):
        """Returns the bytes of a tile, int32 (groups, group / parts, 128)."""
        batch, tokens = at
        found = codes[batch, self._rows(columns), tokens].astype(jnp.int32)
        return found.reshape(-1, self.group // self.parts, LANES)

    def put_bytes(self, codes, at, columns: slice, packed) -> None:
        """Writes the bytes that `bytes_of` reads."""
        batch, tokens = at
        codes[batch, self._rows(columns), tokens] = packed.reshape(-1, LANES).astype(jnp.uint8)

    def tokens_of(self, numbers, at):
        """Returns the entries of (batch, n, tokens) for 128 tokens, float32 (n, 128)."""
        batch, tokens = at
        return numbers[batch, :, tokens].astype(jnp.float32)

    def put(self, numbers, at, found) -> None:
        """Writes the entries that `tokens_of` reads, in the dtype of `numbers`."""
        batch, tokens = at
        numbers[batch, :, tokens] = found.astype(numbers.dtype)

    def _of_row(self, columns: slice) -> tuple[slice, slice]:
        return (columns, slice(None)) if self.turned else (slice(None), columns)

    def _rows(self, columns: slice) -> slice:
        return slice(columns.start // self.parts, columns.stop // self.parts)


def _wide(x):
    """Converts integers to int32, and floats to float32."""
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
