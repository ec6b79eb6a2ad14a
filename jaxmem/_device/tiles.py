"""How many bytes an array takes in a TPU's memory, which is divided into tiles."""

import itertools
import math
from collections.abc import Sequence

LANES = 128  # numbers in a row of a tile
ROWS = 8  # of a tile, at most; fewer where an axis is shorter
WORD = 4  # bytes; narrower numbers of several rows share a word


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of an array in a TPU's memory, if the compiler is free to lay it out.

    A tile has 8 rows of 128 numbers, or 4, 2 or 1 rows where that many suffice, but as many rows as
    share a word: 2 of bfloat16, 4 of int8. The compiler takes those two axes for lanes and rows
    that pad least.

    shape: of the array.
    itemsize: bytes of a number in it.
    """
    sides = [n for n in shape if n != 1]
    least = max(1, WORD // itemsize)
    if not math.prod(sides):
        return 0
    whole = math.prod(sides)
    choices = itertools.permutations([*sides, 1, 1], 2)
    return itemsize * min(
        whole // (rows * lanes) * _up(rows, _rows(rows, least)) * _up(lanes, LANES)
        for rows, lanes in set(choices)
    )


def _rows(side: int, least: int) -> int:
    """Rows of a tile for an axis: the least power of two that holds it, within bounds."""
    return max(least, min(ROWS, 1 << max(0, side - 1).bit_length()))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
