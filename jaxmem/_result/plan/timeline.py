"""The predicted lanes of a step, layer by layer, as plain data that a plan's file holds."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxmem._result.plan import timeline_text
from jaxmem._result.plan.checked import FINITE, WHOLE, Broken, checked, is_number, is_size
from jaxmem._result.plan.lanes import LANES, PLACED, Group, Lane, Pass

OUTSIDE = "what crosses outside the layers"


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

    microbatches: int
    groups: tuple[Group, ...]
    alone_seconds: float
    outside_seconds: float
    outer_device_bytes: int
    outer_host_bytes: int

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

    def numbered(self) -> list[tuple[int, Group]]:
        """Returns pairs of the number of a group's first layer, counted from 0, and the group."""
        starts, start = [], 0
        for group in self.groups:
            starts.append((start, group))
            start += group.count
        return starts

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
        for group in self.groups:
            yield from group.runs(self.microbatches)

    def __str__(self) -> str:
        return timeline_text.drawn(self)


def write(timeline: Timeline) -> dict[str, Any]:
    """What a plan's file holds of it."""
    data = dataclasses.asdict(timeline)
    plain = lambda group: group | {name: group[name]["lanes"] for name in _PASSES}
    return data | {"groups": [plain(group) for group in data["groups"]]}


_PASSES = ("forward", "backward", "last")
_SECONDS = (FINITE, is_number)
_FIELDS = {
    "microbatches": ("a whole number of at least 1", lambda v: is_size(v) and v > 0),
    "groups": ("a list of groups of layers", lambda v: isinstance(v, list) and len(v) > 0),
    **dict.fromkeys(("alone_seconds", "outside_seconds"), _SECONDS),
    **dict.fromkeys(("outer_device_bytes", "outer_host_bytes"), (WHOLE, is_size)),
}
_GROUP = {
    "count": ("a whole number of at least 1", lambda v: is_size(v) and v > 0),
    "place": (f"one of {', '.join(PLACED)}", lambda v: isinstance(v, str) and v in PLACED),
    **dict.fromkeys(("device_bytes", "host_bytes"), (WHOLE, is_size)),
    **dict.fromkeys(_PASSES, ("an object: lane -> seconds", lambda v: isinstance(v, dict))),
}


def read(value: Any, field: str) -> Timeline | None:
    """Undoes `write`; None where a file holds none. Raises Broken."""
    if value is None:
        return None
    fields = checked(value, field, _FIELDS)
    groups = tuple(_group(one, f"{field}.groups[{i}]") for i, one in enumerate(fields["groups"]))
    return dataclasses.replace(Timeline(**fields), groups=groups)


def _group(value: Any, field: str) -> Group:
    fields = checked(value, field, _GROUP)
    passes = {name: _pass(fields[name], f"{field}.{name}") for name in _PASSES}
    return dataclasses.replace(Group(**fields), **passes)


def _pass(value: dict, field: str) -> Pass:
    known = {lane.key for lane in LANES}
    if not value.keys() <= known:
        raise Broken(field, value, f"seconds of the lanes {', '.join(sorted(known))} alone")
    seconds = checked(value, field, dict.fromkeys(value, _SECONDS))
    return Pass({key: float(s) for key, s in seconds.items()})
