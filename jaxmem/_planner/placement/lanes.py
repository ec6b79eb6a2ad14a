"""When the lanes of a layer run: compute, copies to the device, copies to the host; and what of the
copies no work hides.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem._planner.placement.layer import (
    BUFFERED,
    COPIED,
    RESIDENT,
    STREAMED,
    LayerPolicy,
    States,
)
from jaxmem._planner.placement.sharding import ONE_DEVICE, Sharding
from jaxmem._result.plan.timeline import Pass, PlacedLayers

# The share of what is written back to host memory that runs beside work: XLA schedules none of it
# there (benchmarks/streamed.py, "stored beside products").
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


def lanes_of(
    way: LayerPolicy, place: str, states: States, link: Link, sharding: Sharding = ONE_DEVICE
) -> PlacedLayers:
    """The lanes of one layer that goes this way, and whose states lie at `place`.

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
    work = way.backward_seconds
    three = (
        Pass.of_lanes(way.forward_seconds, forward * to_device, own * to_host, 0.0, beside, waited),
        Pass.of_lanes(work, (backward + own) * to_device, 0.0, m * back, beside, late),
        Pass.of_lanes(work, (last + own) * to_device, 0.0, (p + m) * back, beside, late),
    )
    if not link.beside:
        three = (one.in_turn() for one in three)
    return PlacedLayers(1, place, states.on_device(place), states.on_host(place), *three)


def fetched_first(places: Sequence[str], states: States, link: Link) -> float:
    """Seconds in which a step fetches what its loops begin with, beside no work."""
    streams = any(place in (STREAMED, BUFFERED) for place in places)
    return states.parameters / link.to_device if streams else 0.0
