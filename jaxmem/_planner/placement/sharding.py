"""What crosses between devices over which a released step is divided, and when."""

import dataclasses
import math

from jaxmem._model.states.places import DIVIDED
from jaxmem._planner.placement.layer import States

NOTHING, MOMENTS, STATES, LAYERS = DIVIDED
# The share of what a layer gathers that crosses beside its own work: on Hopper and later all but
# the weights of its first product, elsewhere less, by how XLA schedules it. Scattered gradients are
# waited for (benchmarks/streamed.py).
GATHERED_BESIDE, LESS_BESIDE = 0.75, 0.4


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a step is divided over devices. Collectives are rings, in which each device sends and is
    sent all but its own part.

    divided: one of DIVIDED.
    devices: over how many.
    rate: bytes a second that each sends, and is sent.
    accumulates: whether undivided moments are each device's own until the end of a minibatch, as
      AdamA's. Another optimizer's step reduces each layer's gradient, and gathers by layer.
    beside: the share of what a layer gathers that crosses beside its work.
    """

    divided: str = NOTHING
    devices: int = 1
    rate: float = math.inf
    accumulates: bool = True
    beside: float = GATHERED_BESIDE

    @property
    def by_layer(self) -> bool:
        """Whether the layers' parameters are gathered one at a time, as their turn comes: only such
        states may lie in host memory.
        """
        return self.divided == LAYERS

    def crossing(self, nbytes: int) -> float:
        """Seconds in which arrays of so many bytes are gathered from parts, or scattered to them.
        To reduce them on all devices takes twice as long.
        """
        return (self.devices - 1) / self.devices * nbytes / self.rate

    def gathered(self, states: States) -> float:
        """Seconds in which a layer's parameters are gathered, in each pass through it."""
        return self.crossing(states.wire) if self.by_layer else 0.0

    def scattered(self, states: States) -> float:
        """Seconds in which a layer's gradient is scattered or reduced, in each backward."""
        # Gradients of parameters that are whole have their dtype, not that of compute.
        if self.divided == NOTHING:
            return 0.0 if self.accumulates else 2 * self.crossing(states.parameters)
        return self.crossing(states.parameters if self.divided == MOMENTS else states.wire)

    def alone(self, states: States, microbatches: int) -> float:
        """Seconds of a step in which something crosses beside no layer's work: at its start and
        its end, and for the arrays outside the layers.
        """
        if self.divided == NOTHING and not self.accumulates:
            return 2 * microbatches * self.crossing(states.outside_stored)
        if self.divided == NOTHING:
            return 2 * self.crossing(states.layers * states.moments + states.outside)
        if self.divided == MOMENTS:
            outside = (1 + microbatches) * self.crossing(states.outside_stored)
            return outside + states.layers * self.crossing(states.parameters)
        outside = (1 + microbatches) * self.crossing(states.outside_wire)
        return outside + (0.0 if self.by_layer else states.layers * self.crossing(states.wire))


ONE_DEVICE = Sharding()
