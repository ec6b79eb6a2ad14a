"""The lanes of a layer: how long its work and its copies take, as plain data."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Lane:
    """A line of its own, on which one thing runs at a time.

    key: its name in a plan's file, which is that of the planner's.
    name: in words.
    beside: whether it runs beside the work of its layer; else when all of that is done.
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
    """One pass through one layer.

    lanes: seconds of each lane, by its key.
    """

    lanes: Mapping[str, float]

    def of(self, lane: Lane) -> float:
        """Seconds of a lane."""
        return self.lanes.get(lane.key, 0.0)

    @property
    def work(self) -> float:
        """Seconds of the lanes that run beside one another, the slowest of which counts."""
        return max(self.of(lane) for lane in LANES if lane.beside)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.work + sum(self.of(lane) for lane in LANES if not lane.beside)

    @property
    def exposed(self) -> float:
        """What the other lanes add to the compute."""
        return self.seconds - self.of(WORK)

    def exposed_by(self) -> dict[Lane, float]:
        """The same by the lane that is waited for: of those beside the compute the slowest."""
        late = {lane: self.of(lane) for lane in COPIES if not lane.beside}
        slowest = max((lane for lane in LANES if lane.beside), key=self.of)
        waits = {} if slowest is WORK else {slowest: self.of(slowest) - self.of(WORK)}
        return {lane: seconds for lane, seconds in (waits | late).items() if seconds > 0}


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that are alike.

    count: how many.
    place: where their states lie, a key of `PLACED`.
    device_bytes, host_bytes: of one layer's states, in either memory.
    forward: of every microbatch.
    backward: of every microbatch but the last.
    last: the backward of the last microbatch, in which states that stream are updated.
    """

    count: int
    place: str
    device_bytes: int
    host_bytes: int
    forward: Pass
    backward: Pass
    last: Pass

    def runs(self, microbatches: int) -> tuple[tuple[Pass, int], ...]:
        """Its passes, and how often a step has each of all its layers together."""
        n = self.count
        early = (microbatches - 1) * n
        return (self.forward, microbatches * n), (self.backward, early), (self.last, n)


def named(start: int, count: int) -> str:
    """Layers in words, numbered from 1: "layers 2 to 5", or "layer 2"."""
    return f"layers {start + 1} to {start + count}" if count > 1 else f"layer {start + 1}"
