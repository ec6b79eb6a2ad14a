"""Divides arrays into the blocks of a TPU's programs, and transposes them to the kernels' layout.

Codes (*lead, T, K, H) are written as (*lead, K, H, T), and scales (*lead, T, K) as (*lead, K, T):
an array's tile in memory has 8 × 128 numbers, which 128 tokens fill and 32 bytes of a group do not.
XLA stores an array in any order of axes, so the transposition back moves no data.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxmem_kernels.tpu.tiles import LANES, Tiles

# Number of values of a program: a megabyte of bfloat16. Moving these values through memory takes a
# few times as long as starting a program.
VALUES = 2**19
# Most bytes of a tensor in a program that needs all tokens of some channels. These bytes, the next
# block and two blocks of codes together fit the least memory of a core that a kernel gets.
MOST_HELD = 2**22
# The code over columns is unrolled.
MOST_COLUMNS = 4096
# A block of bytes, and a block of scales, has all rows, or a multiple of these numbers.
BYTE_ROWS, SCALE_ROWS = 32, 16


class Argument(NamedTuple):
    """An array that a kernel reads, or the shape and dtype of an array that it writes, and the
    array's blocks.

    The program's indices along the batch, along tokens and along columns select the block.
    """

    array: Any
    block: pl.BlockSpec


class Blocks(NamedTuple):
    """The blocks of an array (*lead, T, W).

    lead: the axes before tokens.
    tokens: T.
    width: W.
    tiles: the tiles of a block.
    """

    lead: tuple[int, ...]
    tokens: int
    width: int
    tiles: Tiles

    @property
    def grid(self) -> tuple[int, int, int]:
        """The number of blocks along the batch, along tokens and along columns."""
        batch, tokens, columns = self.tiles.batch, self.tiles.tokens, self.tiles.columns
        return self.batch // batch, -(-self.tokens // tokens), self.width // columns

    @property
    def batch(self) -> int:
        return math.prod(self.lead)

    def values(self, x) -> Argument:
        """Returns `x` (*lead, T, W) as an argument for `Tiles.read` or `Tiles.write`."""
        if not self.tiles.turned:
            shape, block = (self.tokens, self.width), (self.tiles.tokens, self.tiles.columns)
            spec = pl.BlockSpec((self.tiles.batch, *block), lambda b, i, j, *_: (b, i, j))
            return Argument(_reshaped(x, (self.batch, *shape)), spec)
        return self._tokens_last(_swapped(x), self.width, self.tiles.columns)

    def codes(self, codes=None) -> Argument:
        """Returns codes (*lead, T, K, H) as an argument. None means codes that are written."""
        rows, block = (n // self.tiles.parts for n in (self.width, self.tiles.columns))
        if codes is None:
            codes = jax.ShapeDtypeStruct((rows, self.tokens), jnp.uint8)
        else:
            codes = jnp.moveaxis(codes, -3, -1)
        return self._tokens_last(codes, rows, block)

    def scales(self, scales) -> Argument:
        """Returns scales (*lead, T, K) as an argument. The name of a dtype means scales that are
        written.
        """
        rows, block = (n // self.tiles.group for n in (self.width, self.tiles.columns))
        if isinstance(scales, str):
            scales = jax.ShapeDtypeStruct((rows, self.tokens), jnp.dtype(scales))
        else:
            scales = _swapped(scales)
        return self._tokens_last(scales, rows, block)

    def slots(self, values) -> Argument:
        """Returns the values (*lead, T, S) of slots as an argument. A shape (S,) means values that
        are written.
        """
        return self._tokens_last(_swapped(values), values.shape[-1], values.shape[-1], whole=True)

    def row(self, row) -> Argument:
        """Returns an array (W,), with an entry for each value of a row, as an argument."""
        turned = self.tiles.turned
        row = _reshaped(row, (self.width, 1) if turned else (1, self.width))
        place = lambda b, i, j, *_: (j, 0) if turned else (0, j)
        return Argument(row, pl.BlockSpec(self.tiles.row_shape, place))

    def decoded(self, dtype) -> Argument:
        """Returns the decoded array, which is written, as an argument."""
        shape = (self.width, self.tokens) if self.tiles.turned else (self.tokens, self.width)
        return self.values(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))

    def as_codes(self, codes):
        """Returns the written codes as (*lead, T, K, H)."""
        each = self.tiles.group // self.tiles.parts
        return jnp.moveaxis(codes.reshape(*self.lead, -1, each, self.tokens), -1, -3)

    def as_scales(self, scales):
        """Returns the written scales as (*lead, T, K)."""
        return _swapped(scales.reshape(*self.lead, -1, self.tokens))

    def as_slots(self, values):
        """Returns the written values of slots as (*lead, T, S)."""
        return _swapped(values.reshape(*self.lead, -1, self.tokens))

    def as_values(self, x):
        """Returns the written values as (*lead, T, W)."""
        if self.tiles.turned:
            return _swapped(x.reshape(*self.lead, self.width, self.tokens))
        return x.reshape(*self.lead, self.tokens, self.width)

    def _tokens_last(self, array, rows: int, block: int, whole: bool = False) -> Argument:
        """Returns an array with the axes rows and tokens as an argument, in blocks of `block` rows.
        If `whole` is true, one block has all rows.
        """
        spec = pl.BlockSpec(
            (self.tiles.batch, block, self.tiles.tokens),
            lambda b, i, j, *_: (b, 0 if whole else j, i),
        )
        return Argument(_reshaped(array, (self.batch, rows, self.tokens)), spec)


def of(shape: tuple[int, ...], group: int, parts: int) -> Blocks:
    """As `fitting`, for a shape that `choice` takes. Raises ValueError for other shapes."""
    if (found := fitting(shape, group, parts)) is None:
        raise ValueError(
            f"`x` is {shape} in groups of {group}; expected a shape that a TPU's kernel takes: call"
            " `choice.launcher`, and use the reference if it returns None"
        )
    return found


def of_channels(shape: tuple[int, ...], group: int, parts: int, itemsize: int) -> Blocks:
    """As `of`, for blocks of all tokens."""
    if (found := fitting_channels(shape, group, parts, itemsize)) is None:
        raise ValueError(
            f"`x` is {shape} in groups of {group}, of {itemsize} bytes a value; expected a shape"
            " whose channels fit a TPU's kernel: call `choice.launcher`, and use `quantize_by` if"
            " it returns None"
        )
    return found


def fitting(shape: tuple[int, ...], group: int, parts: int) -> Blocks | None:
    """Returns the blocks of an array (*lead, T, W) in groups of `group`. The `parts` of a group
    share bytes. Returns None if no kernel takes this shape.
    """
    columns = [n for n in _columns(shape, group, parts) if _fills(n // group, shape, n, SCALE_ROWS)]
    if not columns:
        return None
    *lead, tokens, _ = shape
    least = [n for n in columns if n <= MOST_COLUMNS // 4]
    block = max(least) if least else min(columns)
    rows = min(max(VALUES // block, LANES), tokens + LANES - 1) // LANES * LANES
    most = max(VALUES // (block * rows), 1)
    batch = max(n for n in range(1, most + 1) if math.prod(lead) % n == 0)
    return _divided(shape, group, parts, (batch, rows, block))


def fitting_channels(
    shape: tuple[int, ...], group: int, parts: int, itemsize: int
) -> Blocks | None:
    """As `fitting`, for blocks of all tokens. Returns None if a core's memory cannot hold a block.

    itemsize: bytes of a value.
    """
    if not (columns := _columns(shape, group, parts)):
        return None
    *lead, tokens, _ = shape
    batch, rows = math.prod(lead), -(-tokens // LANES) * LANES
    held = [n for n in columns if batch * rows * n * itemsize <= MOST_HELD]
    if not held:
        return None
    block = next((n for n in held if batch * rows * n >= VALUES), held[-1])
    return _divided(shape, group, parts, (batch, rows, block))


def _divided(shape, group: int, parts: int, block: tuple[int, int, int]) -> Blocks:
    """Returns the blocks of an array. `block` has the numbers of sets, tokens and columns."""
    *lead, tokens, width = shape
    chunk = _chunk(width, group, parts)
    assert chunk is not None
    turned = width % max(group, LANES) != 0
    return Blocks(tuple(lead), tokens, width, Tiles(parts, group, *block, chunk, turned))


def _columns(shape: tuple[int, ...], group: int, parts: int) -> list[int]:
    """Returns the possible numbers of columns of a block, in order. The bytes of the columns fill
    vectors.
    """
    if len(shape) < 2 or not all(isinstance(n, int) for n in shape):
        return []
    width, chunk = shape[-1], _chunk(shape[-1], group, parts)
    if shape[-2] < LANES or chunk is None:
        return []
    every = range(chunk, min(width, MOST_COLUMNS) + 1, chunk)
    return [n for n in every if width % n == 0 and _fills(n // parts, shape, n, BYTE_ROWS)]


def _fills(rows: int, shape: tuple[int, ...], columns: int, multiple: int) -> bool:
    """Whether a block with these rows and columns has whole vectors, or all columns."""
    return columns == shape[-1] or rows % multiple == 0


def _chunk(width: int, group: int, parts: int) -> int | None:
    """Returns the number of columns of a tile: whole groups that fill vectors of bytes, or a whole
    row. Returns None if there is no such number.
    """
    each = group // parts
    if width % group or group % parts or each < 8 or each & (each - 1) or group > 1024:
        return None
    for chunk in (max(group, LANES), group):
        if width % chunk == 0 and chunk // parts % BYTE_ROWS == 0:
            return chunk
    return width if width <= 4 * LANES else None


def _swapped(x):
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jnp.swapaxes(x, -1, -2)


def _reshaped(x, shape: tuple[int, ...]):
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return x.reshape(shape)
