"""Reshaping an array of any shape into rows of contiguous parts, the parts that share bytes when packed.

Parts and not neighbours share a byte: strided packing (`q[::2]`) costs XLA a slow concatenation.
"""

import math

import jax.numpy as jnp


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def part_shape(shape: tuple[int, ...], group: int, parts: int) -> tuple[int, int, int]:
    """(R, parts, H): the flat array in groups of `group` values; one smaller group where there are fewer values.

    `group` is a multiple of `parts`.
    """
    size = math.prod(shape)
    group = min(group, _round_up(max(size, 1), parts))
    return -(-size // group), parts, group // parts


def to_parts(x, group: int, parts: int):
    """`x` of any shape as `part_shape`; what the last group lacks repeats the last value."""
    rows, _, width = target = part_shape(x.shape, group, parts)
    flat, missing = x.reshape(-1), rows * parts * width - x.size
    if missing:
        flat = jnp.concatenate([flat, jnp.broadcast_to(flat[-1:], (missing,))])
    return flat.reshape(target)


def from_parts(blocks, shape: tuple[int, ...]):
    """The inverse of `to_parts`."""
    size = math.prod(shape)
    flat = blocks.reshape(-1)
    return (flat if flat.size == size else flat[:size]).reshape(shape)


def row_shape(shape: tuple[int, ...], parts: int) -> tuple[int, int, int]:
    """(T, parts, H): the last axis in `parts`, the others flat; a 0-d array is one row of one value."""
    width = shape[-1] if shape else 1
    return math.prod(shape[:-1]), parts, -(-width // parts)


def to_rows(x, parts: int):
    """`x` of any shape as `row_shape`; zeros fill the last axis."""
    rows, _, width = target = row_shape(x.shape, parts)
    matrix = x.reshape(rows, x.shape[-1] if x.shape else 1)
    missing = parts * width - matrix.shape[1]
    return (jnp.pad(matrix, ((0, 0), (0, missing))) if missing else matrix).reshape(target)


def from_rows(blocks, shape: tuple[int, ...]):
    """The inverse of `to_rows`."""
    rows, parts, width = blocks.shape
    matrix, used = blocks.reshape(rows, parts * width), shape[-1] if shape else 1
    return (matrix if used == parts * width else matrix[:, :used]).reshape(shape)
