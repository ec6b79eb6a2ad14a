"""The marks of a timeline's figure, for pages and notebooks, which add their own texts.

Positions are percent, so that a figure stretches and its text keeps its size. The marks have
attributes for colours and sizes, because a notebook has no style sheet. A page's style sheet
overrides these attributes.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.timeline import (
    LANES,
    PLACED,
    WORK,
    Lane,
    Pass,
    PlacedLayers,
    Timeline,
    exposed,
    named,
)
from jaxmem._result.svg import axis, boxes, element, escape, percent, upright

CELLS = 48  # at most, of a group of layers in one pass; where there are more they share cells
EXPOSED = "exposed"
# Colours of the lanes in their order, equal to the lines' colours in the style sheet, and the
# colour of exposed time.
_COLOURS = ("#0072b2", "#d55e00", "#0f9d78", "#a8508a", "#8a6d00", "#56748f")
_RED = "#b3261e"
# Colours of places: darker for more bytes on the device.
_PLACES = {"resident": "#1f3a6e", "copied": "#4f7fc9", "buffered": "#8fb0e0", "streamed": "#d3e1fa"}


@dataclasses.dataclass(frozen=True)
class Panel:
    """Microbatches that run alike.

    title: the name of the microbatches.
    rows: the name of each lane, and the SVG marks of its row. The last row is the time in which
      compute waits.
    head: the names of the forward and of the backwards, as SVG, over the rows.
    ticks: milliseconds, as SVG, under the rows.
    said: the text for screen readers.
    """

    title: str
    rows: tuple[tuple[str, str], ...]
    head: str
    ticks: str
    said: str


def panels(timeline: Timeline) -> list[Panel]:
    """The panels of a step on one scale: the microbatches before the last one, if there are any,
    and the last one. Empty if the layers take no time that can be drawn.
    """
    count, numbered = timeline.microbatches, timeline.numbered()
    turned = numbered[::-1]
    kinds = [("the step", "last")]
    if count > 1:
        several = f"each of the first {count - 1} microbatches"
        early = several if count > 2 else "the first microbatch"
        kinds = [(early, "backward"), ("the last microbatch", "last")]
    of = lambda groups, name: [(start, group, getattr(group, name)) for start, group in groups]
    before = [("forward", of(numbered, "forward"))]
    if timeline.clips_by_norm:
        before.append(("backward for the norm", of(turned, "norm")))
    parts = [(title, [*before, ("backward", of(turned, back))]) for title, back in kinds]
    longest = max(sum(_seconds(run) for _, run in runs) for _, runs in parts)
    if not 0 < longest < math.inf:
        return []
    return [_panel(title, runs, longest, exposed(timeline)) for title, runs in parts]


_Run = Sequence[tuple[int, PlacedLayers, Pass]]  # groups in the order in which they run
_Placed = tuple[float, int, Pass]  # a group: its start in seconds, its layers, and one layer's pass


def _seconds(run: _Run) -> float:
    """The seconds of groups of layers that run after each other."""
    return sum(group.count * one.seconds for _, group, one in run)


def _panel(title: str, runs: Sequence[tuple[str, _Run]], longest: float, said: str) -> Panel:
    """The lanes of a forward and of its backwards as a figure.

    runs: the forward and the backwards, by name: the groups of layers in the order of the run.
    longest: seconds of the whole scale.
    """
    scale = 100 / longest
    groups: list[_Placed] = []
    words, phases, at = [], [], 0.0
    for phase, run in runs:
        phases.append((scale * (at + _seconds(run) / 2), phase))
        for start, group, one in run:
            words.append(f"{phase}, {named(start, group.count)}, {PLACED[group.place]}")
            groups.append((at, group.count, one))
            at += group.count * one.seconds
    edges = _edges(scale * start for start, *_ in groups[1:])
    rows = [
        (lane.name, _lane(lane, i, groups, words, scale) + edges)
        for i, lane in enumerate(LANES)
        if lane is WORK or any(one.of(lane) for *_, one in groups)
    ]
    waits = (_bars(group, group[-1].of(WORK), group[-1].exposed, scale) for group in groups)
    idle = boxes(itertools.chain(*waits), "waiting", fill=_RED)
    rows.append((EXPOSED, idle + edges))
    milliseconds = axis(0.0, 1e3 * longest)
    ticks = ((milliseconds.percent(value), text) for value, text in milliseconds.ticks)
    took = f"{title}: {1e3 * at:,.2f} ms in the layers"
    return Panel(title, tuple(rows), _labels(phases), _labels(ticks), f"Lanes of {took}; {said}")


def _labels(texts: Iterable[tuple[float, str]]) -> str:
    """Texts at positions in percent."""
    plain = {"y": "12", "font_size": "11", "text_anchor": "middle", "fill": "currentColor"}
    return "".join(
        element("text", escape(text), css="tick mid", x=percent(at), **plain) for at, text in texts
    )


def _bars(
    group: _Placed, begin: float, seconds: float, scale: float
) -> Iterator[tuple[float, float]]:
    """The bars of some work of a group, as left and width in percent: a bar for each layer, or for
    several layers together.

    begin, seconds: the work in the pass of one layer.
    """
    start, layers, one = group
    each = -(-layers // CELLS)  # layers to a bar, rounded up
    for first in range(0, layers, each):
        many = min(each, layers - first)
        yield scale * (start + first * one.seconds + many * begin), scale * many * seconds


def _lane(lane: Lane, i: int, groups: Sequence[_Placed], words: Sequence[str], scale: float) -> str:
    """The marks of one lane, a path for each group and pass."""
    drawn = []
    for group, text in zip(groups, words):
        *_, one = group
        if not one.of(lane):
            continue
        title = f"{text}: {lane.name} {1e3 * one.of(lane):,.3f} ms a layer"
        colour = i % len(_COLOURS)
        at = _bars(group, one.start(lane), one.of(lane), scale)
        drawn.append(boxes(at, f"lane s{colour}", title, _COLOURS[colour]))
    return "".join(drawn)


def _edges(edges: Iterable[float]) -> str:
    """Upright lines at positions in percent."""
    plain = {"stroke": "currentColor", "stroke_opacity": ".4"}
    return "".join(upright(x, "phase", **plain) for x in edges)


def places(timeline: Timeline) -> str:
    """The layers in order, coloured by the memory of their states. Each layer has a cell if there
    is space.
    """
    total = sum(group.count for group in timeline.groups)
    drawn = []
    for start, group in timeline.numbered():
        each = show_bytes(group.device_bytes), show_bytes(group.host_bytes)
        title = (
            f"{named(start, group.count)}, {PLACED[group.place]}: {each[0]} on the device and"
            f" {each[1]} in host memory for each"
        )
        at = [(100 * start / total, 100 * group.count / total)]
        drawn.append(boxes(at, f"p-{group.place}", title, _PLACES[group.place]))
    edges = [100 * start / total for start, _ in timeline.numbered()[1:]]
    return "".join(drawn) + _edges(edges)


def colour(place: str) -> str:
    """The colour of a place without a style sheet."""
    return _PLACES[place]
