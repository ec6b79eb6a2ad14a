"""The costs of one layer of a stack: the bytes of its states by the place where they are stored,
the bytes and seconds of its tensors by policy, and the seconds of its transfers, to the host and
between devices.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxmem._core.actions import Choice
from jaxmem._model.states.places import DIVIDED
from jaxmem._result.plan.timeline import PLACED, Pass, PlacedLayers

# Where the states of a layer may be stored, in the order of the layers of a stack.
PLACES = tuple(PLACED)
RESIDENT, COPIED, STREAMED, BUFFERED = PLACES
# The states that are divided over several devices.
NOTHING, MOMENTS, STATES, LAYERS = DIVIDED
# The share of a write to host memory that overlaps with work: XLA overlaps none of it
# (benchmarks/streamed.py at commit c9ec125, "stored beside products").
STORED_BESIDE = 0.0
# The share of a layer's all-gather that overlaps with the layer's own work: on Hopper and later all
# but the weights of its first product, on other devices less, by XLA's schedule. Reduce-scatters of
# gradients do not overlap (benchmarks/streamed.py at commit 7bf2070).
GATHERED_BESIDE, LESS_BESIDE = 0.75, 0.4


@dataclasses.dataclass(frozen=True)
class States:
    """Bytes of a released step's states on one device.

    layers: the number of layers in the stack.
    parameters, moments: bytes of one layer, in the stored dtype.
    copy: bytes of one layer's parameters in the dtype of compute.
    outside: bytes of the optimizer's arrays outside the layers.
    fixed: bytes of all other arguments, which are always in device memory.
    wire: bytes that an all-gather of one layer's parameters moves, in the dtype of compute.
    outside_wire: bytes that an all-gather of the parameters outside the layers moves, in the dtype
      of compute.
    outside_stored: bytes of the parameters outside the layers, in the stored dtype.
    frozen: bytes of one layer's frozen parameters, which are read and never written back.
    frozen_wire: bytes that an all-gather of one layer's frozen parameters moves.
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
    frozen: int = 0
    frozen_wire: int = 0

    @property
    def read(self) -> int:
        """Bytes that a layer's forward reads: its parameters, frozen ones included."""
        return self.parameters + self.frozen

    @property
    def layer(self) -> int:
        """Bytes of one layer's states."""
        return self.read + self.moments

    @property
    def resident(self) -> int:
        """Bytes of all arguments if all states are in device memory."""
        return self.fixed + self.outside + self.layers * self.layer

    def on_device(self, place: str) -> int:
        """Device bytes of one layer's states. The parameters of a `buffered` layer count, since
        they are in device memory from the layer's forward to its backward.
        """
        return {
            RESIDENT: self.layer,
            COPIED: self.copy,
            STREAMED: 0,
            BUFFERED: self.read,
        }[place]

    def on_host(self, place: str) -> int:
        """Host bytes of one layer's states. The frozen parameters of a `copied` layer are in
        device memory alone.
        """
        return {RESIDENT: 0, COPIED: self.layer - self.frozen}.get(place, self.layer)


@dataclasses.dataclass(frozen=True)
class LayerPolicy:
    """Choices for the tensors of one layer, and their costs.

    choices: the choice of each tag.
    device_bytes, host_bytes: bytes that one layer saves for the backward.
    forward_seconds, backward_seconds: seconds of one forward and of one backward of the layer, with
      writing, reading, encoding and recomputing, without transfers.
    backwards: how often the backward runs for each forward: twice if the step clips by the global
      norm, whose first backward computes the norm.
    doubt_seconds: the seconds by which a lossy policy must be faster than a lossless one.
    working: working memory of a step all of whose layers have this policy, without the layers'
      saved tensors; by whether the layers' states are streamed.
    """

    choices: Mapping[str, Choice]
    device_bytes: int
    host_bytes: int
    forward_seconds: float
    backward_seconds: float
    doubt_seconds: float = 0.0
    working: Mapping[bool, int] = dataclasses.field(default_factory=dict)
    backwards: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of one forward and its backwards."""
        return self.forward_seconds + self.backwards * self.backward_seconds

    def with_working(self, resident: int, streamed: int) -> "LayerPolicy":
        return dataclasses.replace(self, working={False: resident, True: streamed})


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers whose states are stored at the same place, and that have the same policy.

    place: one of PLACES.
    policy: an index into the problem's policies.
    """

    place: str
    policy: int


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection between a device and its host.

    to_device, to_host: bytes a second in each direction.
    beside: whether copies overlap with work. On a CPU, the cores make the copies.
    """

    to_device: float
    to_host: float
    beside: bool = True


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a step is divided over devices. Collectives are rings, in which each device sends and
    receives all parts but one.

    divided: one of DIVIDED.
    devices: the number of devices.
    rate: bytes a second that each device sends and receives.
    accumulates: whether each device holds its own undivided moments until the end of a minibatch,
      as with AdamA. A step of another optimizer reduces each layer's gradient, and gathers by
      layer.
    beside: the share of a layer's all-gather that overlaps with the layer's work.
    """

    divided: str = NOTHING
    devices: int = 1
    rate: float = math.inf
    accumulates: bool = True
    beside: float = GATHERED_BESIDE

    @property
    def by_layer(self) -> bool:
        """Whether the layers' parameters are gathered one layer at a time. Only such states may be
        in host memory.
        """
        return self.divided == LAYERS

    def crossing(self, nbytes: int) -> float:
        """Seconds to gather arrays of `nbytes` from their parts, or to scatter them. An all-reduce
        takes twice as long.
        """
        return (self.devices - 1) / self.devices * nbytes / self.rate

    def gathered(self, states: States) -> float:
        """Seconds of the all-gather of one layer's parameters, in each pass through the layer."""
        return self.crossing(states.wire + states.frozen_wire) if self.by_layer else 0.0

    def scattered(self, states: States) -> float:
        """Seconds to scatter or reduce one layer's gradient, in each backward."""
        # Gradients of undivided parameters have the parameters' dtype, not the dtype of compute.
        if self.divided == NOTHING:
            return 0.0 if self.accumulates else 2 * self.crossing(states.parameters)
        return self.crossing(states.parameters if self.divided == MOMENTS else states.wire)

    def alone(self, states: States, microbatches: int) -> float:
        """Seconds of collectives that overlap with no layer's work: at the start and the end of the
        step, and for arrays outside the layers.
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


def lanes_of(
    policy: LayerPolicy, place: str, states: States, link: Link, sharding: Sharding = ONE_DEVICE
) -> PlacedLayers:
    """The lanes of one layer with this policy, whose states are stored at `place`.

    In a loop over equal layers, the copies of one layer overlap with the work of the layer before
    it, which takes as long as the layer's own work. The forward fetches parameters. The backward
    fetches parameters and moments, without the parameters of `buffered` layers. Every microbatch
    writes moments back, and the last microbatch also writes parameters back. The parameters of a
    `copied` layer are fetched only for their update. Frozen parameters are fetched with the others
    of a layer without a copy, and never written back. Over several devices, all passes gather
    parameters if layers are gathered one at a time, and the backwards scatter gradients.

    If the step clips by the global norm, a backward that computes the norm precedes each backward.
    It fetches parameters, without the parameters of `buffered` layers, and no moments.
    """
    p, m, read = states.parameters, states.moments, states.read
    forward = {RESIDENT: 0, COPIED: 0, STREAMED: read, BUFFERED: read}[place]
    backward = {RESIDENT: 0, COPIED: m, STREAMED: read + m, BUFFERED: m}[place]
    last = {RESIDENT: 0, COPIED: p + m, STREAMED: read + m, BUFFERED: m}[place]
    norm = {RESIDENT: 0, COPIED: 0, STREAMED: read, BUFFERED: 0}[place]
    to_device, to_host = 1 / link.to_device, 1 / link.to_host
    back = 0 if place == RESIDENT else (1 - STORED_BESIDE) * to_host
    offloaded = policy.host_bytes
    gathered = sharding.gathered(states)
    overlapped, waited = sharding.beside * gathered, (1 - sharding.beside) * gathered
    alone = waited + sharding.scattered(states)
    forward_work, work = policy.forward_seconds, policy.backward_seconds
    passes = (
        Pass.of_lanes(
            forward_work, forward * to_device, offloaded * to_host, 0.0, overlapped, waited
        ),
        Pass.of_lanes(work, (backward + offloaded) * to_device, 0.0, m * back, overlapped, alone),
        Pass.of_lanes(work, (last + offloaded) * to_device, 0.0, (p + m) * back, overlapped, alone),
        Pass.of_lanes(work, (norm + offloaded) * to_device, 0.0, 0.0, overlapped, alone),
    )
    if not link.beside:
        passes = tuple(one.in_turn() for one in passes)
    # The program clips each microbatch by one norm, so that there is one more backward at most.
    passes = passes if policy.backwards > 1 else passes[:3]
    return PlacedLayers(1, place, states.on_device(place), states.on_host(place), *passes)


def fetched_first(places: Sequence[str], states: States, link: Link) -> float:
    """Seconds of the first fetch of a step, which overlaps with no work."""
    streams = any(place in (STREAMED, BUFFERED) for place in places)
    return states.read / link.to_device if streams else 0.0
