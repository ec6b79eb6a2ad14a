"""What can be reached in a graph."""

from collections.abc import Callable, Iterable


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
