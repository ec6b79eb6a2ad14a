"""When the lanes of a layer run: compute, copies to the device, copies to the host; and what of the
copies no work hides.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem._planner.placement.layer import BUFFERED, COPIED, RESIDENT, STREAMED, States, Way
from jaxmem._planner.placement.sharding import ONE_DEVICE, Sharding

# The share of what is written back to host memory that runs beside work: XLA schedules none of it
# there (benchmarks/streamed_bytes.py, "stored beside products").
STORED_BESIDE = 0.0


@dataclasses.dataclass(frozen=True)
class Link:
    """The line between a device and its host.

    to_device, to_host: bytes a second, each way.
    beside: whether copies run beside work. On a CPU both are the work of its cores.
    """

    to_device: float
    to_host: float
    beside: bool = True


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One pass through a layer, forward or backward, in seconds.

    compute: of its work.
    to_device, to_host: of what is copied beside it.
    stored: of states that are written back, which is not beside it.
    collectives: of what crosses between devices beside the work.
    waited: of what crosses between devices, and is waited for; where no copy runs beside work, of
      all that crosses.
    """

    compute: float
    to_device: float
    to_host: float
    stored: float = 0.0
    collectives: float = 0.0
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it takes: copies run beside the work, each way on a line of its own."""
        beside = max(self.compute, self.to_device, self.to_host, self.collectives)
        return beside + self.stored + self.waited

    @property
    def exposed(self) -> float:
        """What the copies add to the work."""
        return self.seconds - self.compute

    @property
    def in_turn(self) -> "Lanes":
        """The same where nothing runs beside the work: all that crosses is waited for."""
        waited = self.waited + self.to_device + self.to_host + self.collectives
        return Lanes(self.compute, 0.0, 0.0, self.stored, 0.0, waited)


@dataclasses.dataclass(frozen=True)
class Passes:
    """A layer's passes in a step.

    forward: that of every microbatch.
    backward: that of every microbatch but the last.
    last: that of the last microbatch, in which states that stream are updated.
    """

    forward: Lanes
    backward: Lanes
    last: Lanes

    def seconds(self, microbatches: int) -> float:
        """Of one layer in a step."""
        early = (microbatches - 1) * self.backward.seconds
        return microbatches * self.forward.seconds + early + self.last.seconds

    def exposed(self, microbatches: int) -> float:
        """What the copies of one layer add to a step."""
        early = (microbatches - 1) * self.backward.exposed
        return microbatches * self.forward.exposed + early + self.last.exposed


def passes(
    way: Way, place: str, states: States, link: Link, sharding: Sharding = ONE_DEVICE
) -> Passes:
    """The passes of a layer that goes this way, and whose states lie at `place`.

    A layer is fetched while the one before it computes, in a loop of layers alike, so that its
    copies are hidden by as much work as it has itself. The forward fetches parameters; the
    backward parameters and moments, the parameters of `buffered` layers excepted; every microbatch
    writes moments back, the last one parameters too. Of a layer with a copy parameters are fetched
    where they are updated. Over several devices both gather parameters, if layers are gathered one
    at a time, and the backward scatters gradients.
    """
    p, m = states.parameters, states.moments
    forward = {RESIDENT: 0, COPIED: 0, STREAMED: p, BUFFERED: p}[place]
    backward = {RESIDENT: 0, COPIED: m, STREAMED: p + m, BUFFERED: m}[place]
    last = {RESIDENT: 0, COPIED: p + m, STREAMED: p + m, BUFFERED: m}[place]
    to_device, to_host = 1 / link.to_device, 1 / link.to_host
    back = 0 if place == RESIDENT else (1 - STORED_BESIDE) * to_host
    own = way.host_bytes
    gathered = sharding.gathered(states)
    beside, waited = sharding.beside * gathered, (1 - sharding.beside) * gathered
    late = waited + sharding.scattered(states)
    found = Passes(
        Lanes(way.forward_seconds, forward * to_device, own * to_host, 0.0, beside, waited),
        Lanes(way.backward_seconds, (backward + own) * to_device, 0.0, m * back, beside, late),
        Lanes(way.backward_seconds, (last + own) * to_device, 0.0, (p + m) * back, beside, late),
    )
    if link.beside:
        return found
    return Passes(found.forward.in_turn, found.backward.in_turn, found.last.in_turn)


def fetched_first(places: Sequence[str], states: States, link: Link) -> float:
    """Seconds in which a step fetches what its loops begin with, beside no work."""
    streams = any(place in (STREAMED, BUFFERED) for place in places)
    return states.parameters / link.to_device if streams else 0.0
