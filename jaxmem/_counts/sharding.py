"""What crosses between devices over which a released step is divided, and when."""

import dataclasses
import math

from jaxmem._counts.layer import States
from jaxmem._states.places import DIVIDED

NOTHING, MOMENTS, STATES = DIVIDED
# The share of what a layer gathers that crosses beside its own work: all but the weights of its
# first product. Scattered gradients are waited for, as XLA schedules them (benchmarks/sharded.py).
GATHERED_BESIDE = 0.75


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a step is divided over devices. Collectives are rings, in which each device sends and is
    sent all but its own part.

    divided: one of DIVIDED: none, ZeRO-1 or ZeRO-3.
    devices: over how many.
    rate: bytes a second that each sends, and is sent.
    by_layer: whether the layers' parameters are gathered one at a time, as their turn comes, which
      they are where states lie in host memory. Else all are, as a minibatch starts.
    """

    divided: str = NOTHING
    devices: int = 1
    rate: float = math.inf
    by_layer: bool = False

    def crossing(self, nbytes: int) -> float:
        """Seconds in which arrays of so many bytes are gathered from parts, or scattered to them.
        To reduce them on all devices takes twice as long.
        """
        return (self.devices - 1) / self.devices * nbytes / self.rate

    def gathered(self, states: States) -> float:
        """Seconds in which a layer's parameters are gathered, in each pass through it."""
        return self.crossing(states.wire) if self.by_layer else 0.0

    def scattered(self, states: States) -> float:
        """Seconds in which a layer's gradient is scattered, in each backward."""
        return 0.0 if self.divided == NOTHING else self.crossing(states.wire)

    def alone(self, states: States, microbatches: int) -> float:
        """Seconds of a step in which something crosses beside no layer's work: at its start and
        its end, and for the arrays outside the layers.
        """
        if self.divided == NOTHING:
            return 2 * self.crossing(states.layers * states.moments + states.outside)
        outside = (1 + microbatches) * self.crossing(states.outside_wire)
        if self.divided == MOMENTS:
            return outside + states.layers * self.crossing(states.parameters)
        return outside + (0.0 if self.by_layer else states.layers * self.crossing(states.wire))


ONE_DEVICE = Sharding()
