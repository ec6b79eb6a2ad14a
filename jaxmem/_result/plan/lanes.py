"""The lanes of a layer: seconds of its compute and of its transfers, as plain data."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Lane:
    """A sequence of work that runs one item at a time.

    key: the name of the lane in a plan's file.
    name: the name of the lane in text.
    beside: whether the lane overlaps with the other lanes of its layer. Otherwise the lane starts
      when these lanes have ended.
    """

    key: str
    name: str
    beside: bool = True


WORK = Lane("compute", "compute")
# In the order in which they are drawn. A file lacks the lanes that came later: nothing ran there.
LANES = (
    WORK,
    Lane("to_device", "to the device"),
    Lane("to_host", "to the host"),
    Lane("stored", "write-back", beside=False),
    Lane("collectives", "collectives"),
    Lane("waited", "waited for", beside=False),  # collectives too
)
COPIES = tuple(lane for lane in LANES if lane is not WORK)
# Where the states of a layer lie, in words.
PLACED = {
    "resident": "on the device",
    "copied": "in host memory, a copy on the device",
    "streamed": "streamed from host memory",
    "buffered": "streamed, kept until the backward",
}


@dataclasses.dataclass(frozen=True)
class Pass:
    """The lanes of one pass through one layer.

    lanes: key of the lane -> seconds.
    """

    lanes: Mapping[str, float]

    def of(self, lane: Lane) -> float:
        """Returns the seconds of `lane` in the pass."""
        return self.lanes.get(lane.key, 0.0)

    @property
    def work(self) -> float:
        """Seconds of the overlapping lanes: the seconds of the slowest of these lanes."""
        return max(self.of(lane) for lane in LANES if lane.beside)

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        return self.work + sum(self.of(lane) for lane in LANES if not lane.beside)

    @property
    def exposed(self) -> float:
        """Exposed seconds of the pass: the seconds of the pass minus the seconds of compute."""
        return self.seconds - self.of(WORK)

    def exposed_by(self) -> dict[Lane, float]:
        """Returns the exposed seconds of the pass by lane: lane -> seconds.

        Of the overlapping lanes, only the slowest lane can be exposed.
        """
        late = {lane: self.of(lane) for lane in COPIES if not lane.beside}
        slowest = max((lane for lane in LANES if lane.beside), key=self.of)
        waits = {} if slowest is WORK else {slowest: self.of(slowest) - self.of(WORK)}
        return {lane: seconds for lane, seconds in (waits | late).items() if seconds > 0}


@dataclasses.dataclass(frozen=True)
class Group:
    """Equal layers whose states are stored in one place.

    count: number of layers.
    place: the place of the layers' states, a key of `PLACED`.
    device_bytes, host_bytes: bytes of one layer's states, in device memory and in host memory.
    forward: the forward pass of every microbatch.
    backward: the backward pass of every microbatch but the last.
    last: the backward pass of the last microbatch, which updates streamed states.
    """

    count: int
    place: str
    device_bytes: int
    host_bytes: int
    forward: Pass
    backward: Pass
    last: Pass

    def runs(self, microbatches: int) -> tuple[tuple[Pass, int], ...]:
        """Returns each pass, with the number of runs in a step over all layers of the group.

        microbatches: number of microbatches in a step.
        """
        n = self.count
        early = (microbatches - 1) * n
        return (self.forward, microbatches * n), (self.backward, early), (self.last, n)


def named(start: int, count: int) -> str:
    """Layers in words, numbered from 1: "layers 2 to 5", or "layer 2"."""
    return f"layers {start + 1} to {start + count}" if count > 1 else f"layer {start + 1}"
