"""The outlier channels of a tensor at one step, as numbers, rows and JSON (Adacc §3.2).

This file imports no JAX, so that a page about a run is made without JAX.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated, Any

from jaxmem._core.reader import Valid

# A score that is not finite is written as null.
_SCORE = Valid(
    "a finite number or null",
    lambda z: z is None or (isinstance(z, int | float) and not isinstance(z, bool)),
    instead=True,
    make=lambda z: math.nan if z is None else float(z),
)


@dataclasses.dataclass(frozen=True)
class Outliers:
    """The outlier channels of a tag's tensors at one step.

    step: the number of the step.
    block, tag: the label of the block, and the name of the tag.
    channels: number of channels of a tensor.
    counts: for each tensor, the number of channels with Z > 3. Tensors are ordered by microbatch
      and layer: all layers of the first microbatch come first.
    greatest: for each tensor, the greatest Z. NaN if a value was not finite.
    places: for each tensor, the indices of the outlier channels.
    """

    step: int
    block: str
    tag: str
    channels: int
    counts: tuple[int, ...]
    greatest: tuple[Annotated[float, _SCORE], ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def most(self) -> int:
        """The greatest count, which is the capacity that a codec needs."""
        return max(self.counts, default=0)

    @property
    def rate(self) -> float:
        """The share of the channels that are outliers, over all tensors."""
        return sum(self.counts) / max(1, self.channels * len(self.counts))

    def beyond(self, capacity: int) -> int:
        """Returns the number of outlier channels beyond the capacity of a codec.

        The codec quantizes these channels with the other channels.
        """
        return sum(max(0, count - capacity) for count in self.counts)

    def to_json(self) -> dict[str, Any]:
        greatest = [float(z) if math.isfinite(z) else None for z in self.greatest]
        return dataclasses.asdict(self) | {"greatest": greatest}


Counts = dict[str, dict[str, list[int]]]  # block -> tag -> outlier channels of each of its tensors


def counted(found: Iterable[Outliers]) -> Counts:
    """The counts of each tag's tensors."""
    counts: Counts = {}
    for one in found:
        counts.setdefault(one.block, {}).setdefault(one.tag, []).extend(one.counts)
    return counts


def greatest(several: Iterable[Counts]) -> dict[str, dict[str, int]]:
    """The greatest count of each tag, for `jaxmem.plan(..., outliers=)`."""
    found: dict[str, dict[str, int]] = {}
    for counts in several:
        for block, tags in counts.items():
            for tag, numbers in tags.items():
                of = found.setdefault(block, {})
                of[tag] = max(of.get(tag, 0), *numbers, 0)
    return found
