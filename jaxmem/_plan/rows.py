"""What a plan is made of: its table's rows, bytes by what they hold, points of its curve."""

import dataclasses

from jaxmem._core.actions import Choice


@dataclasses.dataclass(frozen=True)
class Row:
    """One tag's line of the table: bytes and milliseconds of one layer."""

    block: str
    tag: str
    kind: str | None
    shape: tuple[int, ...]
    dtype: str
    choice: Choice
    bytes_before: int
    bytes_after: int
    milliseconds: float
    why: str
    layers: int = 1  # how many of them are alive at once


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Device bytes of a compiled step by what they hold; `working` is what neither of the others
    accounts for.
    """

    arguments: int
    saved: int
    working: int


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan that was solved for: bytes of the whole step on one device, and seconds of a step,
    both predicted.
    """

    bytes: int
    seconds: float
