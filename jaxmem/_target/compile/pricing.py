"""What a profile asks of a target: where the times of pieces of work come from."""

from collections.abc import Sequence

from jaxmem._core.database import Timing
from jaxmem._target.devices.target import Target
from jaxmem._trace.job import Job


class Pricing:
    """What a profile asks of a target: where the times of pieces of work come from.

    This base class knows no times, so a profile computes them from the target's peak rates.

    source: "measured", "xla" (its estimates) or "roofline".
    """

    source = "roofline"

    def __init__(self, target: Target):
        self.target = target

    @property
    def device(self) -> str:
        """What a stored time was taken on, as a text; it holds for no other."""
        return f"{self.target.name} {self.target.kind}"

    def times(self, jobs: Sequence[Job]) -> list[Timing] | None:
        """Returns the time of each job, or None unless every one of them has a time."""
        return None

    @property
    def link(self) -> tuple[float, float]:
        """Bytes a second from host memory to the device, and back: measured where they can be."""
        return self.target.link_ways or (self.target.link, self.target.link)
