"""What one layer of a stack takes: its states by where they lie, its tensors by what becomes of
them.
"""

import dataclasses
from collections.abc import Mapping

from jaxmem._core.actions import Choice
from jaxmem._result.plan.timeline import PLACED

# Where the states of a layer may lie, in the order in which the layers of a stack do.
PLACES = tuple(PLACED)
RESIDENT, COPIED, STREAMED, BUFFERED = PLACES


@dataclasses.dataclass(frozen=True)
class States:
    """Bytes of a released step's states on one device.

    layers: how many the stack has.
    parameters, moments: of one layer, as they are stored.
    copy: of one layer's parameters in the dtype that the layers compute in.
    outside: of the optimizer's arrays outside the layers.
    fixed: of all other arguments, which lie on the device in any case.
    wire: of one layer's whole parameters in the dtype of compute, as divided ones are gathered.
    outside_wire, outside_stored: of those outside the layers, so, and as they are stored.
    """

    layers: int
    parameters: int
    moments: int
    copy: int
    outside: int
    fixed: int
    wire: int = 0
    outside_wire: int = 0
    outside_stored: int = 0

    @property
    def layer(self) -> int:
        """Bytes of one layer's states."""
        return self.parameters + self.moments

    def on_device(self, place: str) -> int:
        """What a layer's states take on the device; for `buffered`, from forward to backward."""
        return {
            RESIDENT: self.layer,
            COPIED: self.copy,
            STREAMED: 0,
            BUFFERED: self.parameters,
        }[place]

    def on_host(self, place: str) -> int:
        """What they take in host memory."""
        return 0 if place == RESIDENT else self.layer


@dataclasses.dataclass(frozen=True)
class LayerPolicy:
    """What may become of the tensors of one layer.

    choices: by tag.
    device_bytes, host_bytes: what is saved of one layer.
    forward_seconds, backward_seconds: of one run, with what it writes, reads, encodes and repeats,
      without transfers.
    doubt_seconds: by how much a way that loses accuracy must be faster.
    working: bytes of working memory of a step all of whose layers go this way, beside what they
      save; by whether its states stream.
    """

    choices: Mapping[str, Choice]
    device_bytes: int
    host_bytes: int
    forward_seconds: float
    backward_seconds: float
    doubt_seconds: float = 0.0
    working: Mapping[bool, int] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of one run, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    def with_working(self, resident: int, streamed: int) -> "LayerPolicy":
        return dataclasses.replace(self, working={False: resident, True: streamed})


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """A layer: where its states lie, and what becomes of its tensors.

    place: one of PLACES.
    way: the number of a way.
    """

    place: str
    way: int
