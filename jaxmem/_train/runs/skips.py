"""Which steps a run leaves out, since what they make is not finite."""

import dataclasses
import math
from collections.abc import Collection, Mapping

WATCHED = ("loss", "grad_norm")  # the metrics that must be finite


class NotFinite(Exception):
    """The metrics of step `number` are not finite."""

    def __init__(self, number: int, row: Mapping[str, float]):
        super().__init__()
        self.number = number
        self.said = " and ".join(f"the {name} is {row[name]}" for name in WATCHED if name in row)


def watch(number: int, row: Mapping[str, float]) -> None:
    """Raises NotFinite where a row's loss or gradient is not."""
    if not all(math.isfinite(row.get(name, 0.0)) for name in WATCHED):
        raise NotFinite(number, row)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What is tried next.

    first, count: which steps in a row are not finite, and how many.
    cause: the step before which the run goes back, and which it leaves out; None where nothing is
      left to try.
    skipped: all steps that are then left out.
    """

    first: int
    count: int
    cause: int | None
    skipped: frozenset[int]


def attempt(
    number: int, skipped: Collection[int], causes: Collection[int], not_finite: int
) -> Attempt:
    """What is tried where step `number` is not finite, with these left out already.

    It is left out too. Where so many in a row were left out in vain, the update of the step before
    them has spoilt the state, and what was saved of it: its own metrics could not tell. Then that
    step is left out in their place; `causes` are those of which this was tried.
    """
    out = frozenset({*skipped, number})
    first = next(n for n in range(number, 0, -1) if n - 1 not in out)
    count = number - first + 1
    if count < not_finite:
        return Attempt(first, count, first, out)
    tried = first in causes or len(causes) >= not_finite - 1
    cause = None if tried or first == 1 else first - 1
    return Attempt(first, count, cause, out.difference(range(first, number + 1)) | {first - 1})
