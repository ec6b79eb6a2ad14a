"""Seconds of a TPU's kernels, and of what goes on beside them."""

import dataclasses
import math
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of a kernel or of several that run one after the other.

    busy: in which each is at one of its limits.
    idle: of `busy`, those in which the memory has nothing to do.
    moved: of copies beside them between the device's memory and its cores'.
    crossed: of what moves between devices beside them.
    flops, products: of matrix products, and their number.
    """

    busy: float = 0.0
    idle: float = 0.0
    moved: float = 0.0
    crossed: float = 0.0
    flops: int = 0
    products: int = 0

    @property
    def unused(self) -> float:
        """Seconds of `seconds` in which neither kernels nor copies use the memory."""
        return max(0.0, self.seconds - (self.busy - self.idle) - self.moved)

    @property
    def seconds(self) -> float:
        """Copies hide where the memory is idle, and what crosses hides behind all of it."""
        return max(self.busy + max(0.0, self.moved - self.idle), self.crossed)


def total(works: Iterable[Work]) -> Work:
    """Several that run one after the other."""
    known = list(works)
    add: Callable[[str], float] = lambda name: math.fsum(getattr(w, name) for w in known)
    return Work(
        add("busy"),
        add("idle"),
        add("moved"),
        add("crossed"),
        sum(w.flops for w in known),
        sum(w.products for w in known),
    )
