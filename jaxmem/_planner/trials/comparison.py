"""Two steps that were run in turns: by how much one took longer than the other."""

import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Comparison(Generic[T]):
    """The difference of two steps, each known by its actions, or by their price.

    first, other: the two steps.
    seconds: the measured seconds by which the first took longer.
    noise: the seconds by which the difference may be off.
    """

    first: T
    other: T
    seconds: float
    noise: float
