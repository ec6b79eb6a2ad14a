"""How many bytes an array takes in a TPU's memory, which is divided into tiles."""

import itertools
import math
from collections.abc import Sequence

LANES = 128  # numbers in a row of a tile
ROWS = 8  # of a tile, at most; fewer where an axis is shorter
WORD = 4  # bytes; narrower numbers of several rows share a word
LEAST = 512  # the fewest bytes of a tile
FLAT = 1024  # the most numbers in a tile of an array with one axis


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of an array in a TPU's memory, if the compiler is free to lay it out.

    A tile has 8 rows of 128 numbers, or 4, 2 or 1 rows where that many suffice, but as many rows as
    share a word: 2 of bfloat16, 4 of int8. The compiler takes those two axes for lanes and rows
    that pad least. An array of a single axis has tiles without rows.

    shape: of the array.
    itemsize: bytes of a number in it.
    """
    whole, least = math.prod(shape), max(1, WORD // itemsize)
    if not whole:
        return 0
    if len(shape) < 2:
        return itemsize * _up(whole, min(FLAT, max(LEAST // itemsize, _power(whole))))
    return itemsize * min(
        whole // (rows * lanes) * _up(rows, max(least, min(ROWS, _power(rows)))) * _up(lanes, LANES)
        for rows, lanes in set(itertools.permutations(shape, 2))
    )


def _power(n: int) -> int:
    """The least power of two that is not under a number."""
    return 1 << max(0, n - 1).bit_length()


def _up(n: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-n // multiple) * multiple
