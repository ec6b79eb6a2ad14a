"""Goes through a block of an array in the tiles that a TPU's vectors take."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128


class Tiles(NamedTuple):
    """How a block of tokens and columns is divided into tiles, and where a tile lies in arrays.

    A tile is `chunk` columns of 128 tokens, turned: tokens lie along a vector's lanes and a row's
    values along its sublanes. The parts of a group are then whole vectors, and a group's greatest
    value or its packing move nothing between lanes.

    parts: how many values share a byte.
    group: how many values share a scale.
    batch: how many sets of tokens a block has.
    tokens: how many rows of each.
    columns: how many values of a row.
    chunk: how many columns a tile has.
    turned: whether the array in memory has its tokens last already, as narrow ones have.
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
        """Calls `body(at)` for every 128 tokens of the block; `at` says which, for what follows."""
        tiles = self.tokens // LANES

        # Not `//`, whose signs are found otherwise on each TPU: a program must be lowered for one
        # that is not there.
        def step(i, carry):
            batch, tile = lax.div(i, jnp.int32(tiles)), lax.rem(i, jnp.int32(tiles))
            body((batch, pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)))
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(self.batch * tiles), step, 0)

    def read(self, x, at, columns: slice, change=lambda rows: rows) -> list[jax.Array]:
        """Returns the parts of a tile's groups, each (groups, group / parts, 128), of 32 bits.

        x: (batch, tokens, columns), or where it is turned (batch, columns, tokens).
        change: what is done to the values, which broadcast as `row` says.
        """
        return self.parted(self.tile(x, at, columns, change))

    def tile(self, x, at, columns: slice, change=lambda rows: rows) -> jax.Array:
        """The values (columns, 128) of a tile, of 32 bits; as in `read`."""
        batch, tokens = at
        if self.turned:
            return change(_wide(x[batch, columns, tokens]))
        return change(_wide(x[batch, tokens, columns])).T

    def parted(self, values) -> list[jax.Array]:
        """The parts of the groups of a tile's values (columns, 128)."""
        each = self.group // self.parts
        groups = values.reshape(values.shape[0] // self.group, self.parts, each, LANES)
        return [groups[:, i] for i in range(self.parts)]

    def joined(self, parts) -> jax.Array:
        """The values (columns, 128) of a tile whose parts `read` returned."""
        return jnp.stack(parts, 1).reshape(-1, LANES)

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of a row, of a number for each column of the block."""
        return (self.columns, 1) if self.turned else (1, self.columns)

    def row(self, row, columns: slice):
        """What a row (1, columns), turned (columns, 1), holds for a tile's columns; it broadcasts
        to what `change` gets.
        """
        return row[self._of_row(columns)]

    def put_row(self, row, columns: slice, found) -> None:
        """Writes what `row` reads."""
        row[self._of_row(columns)] = found

    def greatest(self, x, at, columns: slice, known: int):
        """Returns the bits of the greatest |x| of each column of a tile, int32, in the shape that
        `row` has. NaN's are above all others.

        known: how many tokens the array has; a block's memory behind them holds anything.
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
        """Writes (columns, 128) where `read` reads them, as `x`'s dtype, and after `change`."""
        batch, tokens = at
        if self.turned:
            x[batch, columns, tokens] = change(values).astype(x.dtype)
        else:
            x[batch, tokens, columns] = change(values.T).astype(x.dtype)

    def bytes_of(self, codes, at, columns: slice):
        """The bytes of a tile, int32 (groups, group / parts, 128)."""
        batch, tokens = at
        found = codes[batch, self._rows(columns), tokens].astype(jnp.int32)
        return found.reshape(-1, self.group // self.parts, LANES)

    def put_bytes(self, codes, at, columns: slice, packed) -> None:
        """Writes the bytes that `bytes_of` reads."""
        batch, tokens = at
        codes[batch, self._rows(columns), tokens] = packed.reshape(-1, LANES).astype(jnp.uint8)

    def tokens_of(self, numbers, at):
        """All that (batch, n, tokens) holds for 128 tokens, float32 (n, 128)."""
        batch, tokens = at
        return numbers[batch, :, tokens].astype(jnp.float32)

    def put(self, numbers, at, found) -> None:
        """Writes what `tokens_of` reads, as the dtype of `numbers`."""
        batch, tokens = at
        numbers[batch, :, tokens] = found.astype(numbers.dtype)

    def _of_row(self, columns: slice) -> tuple[slice, slice]:
        return (columns, slice(None)) if self.turned else (slice(None), columns)

    def _rows(self, columns: slice) -> slice:
        return slice(columns.start // self.parts, columns.stop // self.parts)


def _wide(x):
    """Integers as int32, and floats as float32."""
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
