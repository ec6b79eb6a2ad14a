"""The predicted lanes of a step, layer by layer: seconds of compute and of transfers as plain data
that a plan's file holds, their sums, and their text.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated

from jaxmem._core.reader import Count, Valid, one_of

OUTSIDE = "what crosses outside the layers"
COLUMNS = 36  # of the longest pass


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
# The places of a layer's states, in words.
PLACED = {
    "resident": "on the device",
    "copied": "in host memory, a copy on the device",
    "streamed": "streamed from host memory",
    "buffered": "streamed, kept until the backward",
}

_LANE_SECONDS = Valid(
    f"seconds of the lanes {', '.join(sorted(lane.key for lane in LANES))} alone",
    lambda seconds: seconds.keys() <= {lane.key for lane in LANES},
)


@dataclasses.dataclass(frozen=True)
class Pass:
    """The lanes of one pass through one layer.

    lanes: key of the lane -> seconds.
    """

    lanes: Annotated[Mapping[str, float], _LANE_SECONDS]

    @classmethod
    def of_lanes(cls, *seconds: float) -> "Pass":
        """A pass with the seconds of each lane, in the order of `LANES`."""
        return cls({lane.key: s for lane, s in zip(LANES, seconds, strict=True)})

    def in_turn(self) -> "Pass":
        """The pass on a machine on which nothing overlaps with compute: all other lanes that would
        are waited for.
        """
        late = sum(self.of(lane) for lane in COPIES if lane.key != "stored")
        return Pass(
            dict.fromkeys(self.lanes, 0.0)
            | {"compute": self.of(WORK), "stored": self.lanes.get("stored", 0.0), "waited": late}
        )

    def start(self, lane: Lane) -> float:
        """Seconds of the pass before a lane starts: the work, and the lanes before this one that do
        not overlap with the work; zero for a lane that overlaps.
        """
        late = itertools.takewhile(lambda other: other is not lane, LANES)
        return 0.0 if lane.beside else self.work + sum(self.of(x) for x in late if not x.beside)

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
class PlacedLayers:
    """Equal layers whose states are stored in one place.

    count: number of layers.
    place: the place of the layers' states, a key of `PLACED`.
    device_bytes, host_bytes: bytes of one layer's states, in device memory and in host memory.
    forward: the forward pass of every microbatch.
    backward: the backward pass of every microbatch but the last.
    last: the backward pass of the last microbatch, which updates streamed states.
    norm: the backward pass of every microbatch that computes the norm of the gradient, before the
      pass that uses the gradient; None if the step does not clip by the global norm.
    """

    count: Count
    place: Annotated[str, one_of(PLACED)]
    device_bytes: int
    host_bytes: int
    forward: Pass
    backward: Pass
    last: Pass
    norm: Pass | None = None

    def seconds(self, microbatches: int) -> float:
        """Returns the seconds of the layers in a step of so many microbatches."""
        return sum(one.seconds * count for one, count in self.runs(microbatches))

    def runs(self, microbatches: int) -> tuple[tuple[Pass, int], ...]:
        """Returns each pass, with the number of runs in a step over all layers of the group.

        microbatches: number of microbatches in a step.
        """
        n = self.count
        early = (microbatches - 1) * n
        norm = () if self.norm is None else ((self.norm, microbatches * n),)
        return (self.forward, microbatches * n), *norm, (self.backward, early), (self.last, n)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The lanes of a step as a plan predicts them.

    The text form draws the lanes of each group of layers.

    Attributes:
      microbatches: number of microbatches in a step.
      groups: groups of equal layers, in the order of the layers.
      alone_seconds: seconds of transfers outside the layers, to the host or between devices, that
        overlap with no compute.
      outside_seconds: seconds of compute outside the layers.
      outer_device_bytes, outer_host_bytes: bytes of the optimizer's arrays outside the layers, in
        device memory and in host memory.
    """

    microbatches: Count
    groups: Annotated[tuple[PlacedLayers, ...], Valid("a list of groups of layers", bool)]
    alone_seconds: float
    outside_seconds: float
    outer_device_bytes: int
    outer_host_bytes: int

    @property
    def clips_by_norm(self) -> bool:
        """Whether each microbatch has a backward that computes the norm of the gradient."""
        return any(group.norm is not None for group in self.groups)

    @property
    def layer_seconds(self) -> float:
        """Seconds of all layers in a step."""
        return sum(one.seconds * count for one, count in self._runs())

    @property
    def seconds(self) -> float:
        """Seconds of a step: the plan's `predicted_seconds`."""
        return self.layer_seconds + self.alone_seconds + self.outside_seconds

    @property
    def exposed_seconds(self) -> float:
        """Exposed seconds of a step, in which copies or collectives run and no compute runs."""
        return self.alone_seconds + sum(one.exposed * count for one, count in self._runs())

    @property
    def exposed_share(self) -> float:
        """Exposed seconds as a share of the seconds of a step, from 0 to 1."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0

    def lane_seconds(self) -> dict[str, float]:
        """Returns the seconds of each lane in all layers of a step: key of the lane -> seconds.

        The seconds include overlapped and exposed work.
        """
        runs = list(self._runs())
        return {lane.key: sum(one.of(lane) * count for one, count in runs) for lane in LANES}

    def exposed_by(self) -> dict[str, float]:
        """Returns the exposed seconds of a step by cause: name of the lane -> seconds.

        Lanes without exposed seconds are left out. Transfers outside the layers have an entry of
        their own.
        """
        found: dict[Lane, float] = collections.defaultdict(float)
        for one, count in self._runs():
            for lane, seconds in one.exposed_by().items():
                found[lane] += seconds * count
        named = {lane.name: found[lane] for lane in LANES if found[lane] > 0}
        return named | ({OUTSIDE: self.alone_seconds} if self.alone_seconds > 0 else {})

    def numbered(self) -> list[tuple[int, PlacedLayers]]:
        """Returns pairs of the number of a group's first layer, counted from 0, and the group."""
        starts = itertools.accumulate((group.count for group in self.groups), initial=0)
        return list(zip(starts, self.groups))

    def by_place(self) -> list[tuple[str, int, int, int, int]]:
        """Returns the ranges of layers whose states are stored in one place.

        Each range is a tuple: the place, the number of the first layer, the number of layers, and
        the bytes of their states in device memory and in host memory. The actions of the layers'
        tensors do not matter.
        """
        found = []
        for place, run in itertools.groupby(self.numbered(), lambda pair: pair[1].place):
            starts, groups = zip(*run)
            here = sum(group.count * group.device_bytes for group in groups)
            there = sum(group.count * group.host_bytes for group in groups)
            found.append((place, starts[0], sum(g.count for g in groups), here, there))
        return found

    def _runs(self) -> Iterator[tuple[Pass, int]]:
        """Each pass of each group of layers, with the number of times that it runs in a step."""
        for group in self.groups:
            yield from group.runs(self.microbatches)

    def __str__(self) -> str:
        return _drawn(self)


def named(start: int, count: int) -> str:
    """The layers in words, numbered from 1: "layers 2 to 5", or "layer 2"."""
    return f"layers {start + 1} to {start + count}" if count > 1 else f"layer {start + 1}"


def _drawn(timeline: Timeline) -> str:
    """The lines of the text form. Lines of lanes have at most 79 characters."""
    passes = [one for group in timeline.groups for one, n in group.runs(timeline.microbatches) if n]
    longest = max(one.seconds for one in passes)
    lines = [f"a layer of each kind in milliseconds; {COLUMNS} columns are {_ms(longest)} ms"]
    for title, kinds in phases(timeline):
        lines += ["", title]
        for start, group, one in kinds:
            alike = f" (x{group.count})" if group.count > 1 else ""
            lines.append(f"  {named(start, group.count)}{alike}, {PLACED[group.place]}")
            lines += _lanes(one, longest)
    return "\n".join([*lines, "", *summary(timeline)])


def phases(timeline: Timeline) -> Iterator[tuple[str, list[tuple[int, PlacedLayers, Pass]]]]:
    """The parts of a step: a title, and the layers in execution order, each as the number of the
    first layer, the group and its pass.
    """
    count, numbered = timeline.microbatches, timeline.numbered()
    of = lambda name, groups: [(start, g, getattr(g, name)) for start, g in groups]
    times = f", {count} times" if count > 1 else ""
    yield f"forward{times}", of("forward", numbered)
    if timeline.clips_by_norm:
        yield f"backward for the norm{times}", of("norm", reversed(numbered))
    if count > 1:
        early = f", {count - 1} times" if count > 2 else ""
        yield f"backward{early}", of("backward", reversed(numbered))
        yield "backward of the last microbatch", of("last", reversed(numbered))
    else:
        yield "backward", of("last", reversed(numbered))


def summary(timeline: Timeline) -> list[str]:
    """The sums over a step, as sentences."""
    outside = timeline.alone_seconds + timeline.outside_seconds
    step = f"a step as predicted: {_ms(timeline.seconds)} ms"
    return [
        f"{step}, of which {_ms(timeline.layer_seconds)} ms in the layers and {_ms(outside)} ms"
        " outside",
        exposed(timeline),
    ]


def exposed(timeline: Timeline) -> str:
    """The exposed seconds of a step by cause, as a sentence without its full stop."""
    if not timeline.exposed_seconds:
        return "exposed: nothing, work hides every copy"
    by = ", ".join(f"{name} {_ms(seconds)} ms" for name, seconds in timeline.exposed_by().items())
    share = f"{100 * timeline.exposed_share:.1f} % of the step"
    return f"exposed, which no work hides: {_ms(timeline.exposed_seconds)} ms, {share} ({by})"


def _lanes(one: Pass, longest: float) -> Iterator[str]:
    """A line for each busy lane: a bar over the time in which it is busy, and its milliseconds."""
    scale = COLUMNS / longest if longest else 0.0
    waits, name = one.exposed_by(), 1 + max(len(lane.name) for lane in LANES)
    for lane in LANES:
        seconds = one.of(lane)
        if not seconds and lane is not WORK:
            continue
        begin, end = (round(scale * (one.start(lane) + extra)) for extra in (0.0, seconds))
        # A lane with any time has a mark.
        bar = " " * min(begin, COLUMNS - 1) + "█" * max(end - begin, 1 if seconds else 0)
        wait = f", {_ms(waits[lane])} exposed" if lane in waits else ""
        yield f"    {lane.name:{name}}{bar:{COLUMNS}} {_ms(seconds):>8}{wait}"


def _ms(seconds: float) -> str:
    """Seconds as a text in milliseconds."""
    return f"{1e3 * seconds:,.2f}"
