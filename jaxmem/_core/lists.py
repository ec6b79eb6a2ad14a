"""Lists, graphs and tables: separates a list by a flag of each element, merges the two parts again,
and thins a list; finds what can be reached in a graph; sets a table of texts in columns.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def separated(values: Sequence, which: Sequence[bool]) -> tuple[list, list]:
    """Returns the values for which `which` is true, and the others, each in order."""
    return [a for a, f in zip(values, which) if f], [a for a, f in zip(values, which) if not f]


def merged(parts: tuple[Iterable, Iterable], which: Iterable[bool]) -> list[Any]:
    """Merges the two lists that `separated` returned, in the original order of the values."""
    true, false = map(iter, parts)
    return [next(true if f else false) for f in which]


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` values, evenly spaced, with the first and the last one."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def reached(first: Iterable[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """Returns `first`, and all that follows from them. `following` returns what follows from one
    directly.
    """
    found: set[int] = set()
    todo = list(first)
    while todo:
        if (one := todo.pop()) not in found:
            found.add(one)
            todo += following(one)
    return found


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, without spaces at their ends. Each column has the width of its longest
    cell.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
