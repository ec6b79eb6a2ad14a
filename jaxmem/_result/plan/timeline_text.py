"""Draws the lanes of a step as text: for each pass the bars of one layer of each group."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxmem._result.plan.lanes import LANES, PLACED, WORK, Group, Pass, named

if TYPE_CHECKING:
    from jaxmem._result.plan.timeline import Timeline

COLUMNS = 36  # of the longest pass
_NAME = 4 + max(len(lane.name) for lane in LANES)


def drawn(timeline: "Timeline") -> str:
    """The lines. Those of lanes have at most 79 characters."""
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


def phases(timeline: "Timeline") -> Iterator[tuple[str, list[tuple[int, Group, Pass]]]]:
    """The parts of a step: a title, and the layers in the order in which they run, as the number
    of the first one, the group and its pass.
    """
    count, numbered = timeline.microbatches, timeline.numbered()
    of = lambda name, groups: [(start, g, getattr(g, name)) for start, g in groups]
    times = f", {count} times" if count > 1 else ""
    yield f"forward{times}", of("forward", numbered)
    if count > 1:
        early = f", {count - 1} times" if count > 2 else ""
        yield f"backward{early}", of("backward", reversed(numbered))
        yield "backward of the last microbatch", of("last", reversed(numbered))
    else:
        yield "backward", of("last", reversed(numbered))


def summary(timeline: "Timeline") -> list[str]:
    """The sums over a step, as sentences."""
    outside = timeline.alone_seconds + timeline.outside_seconds
    step = f"a step as predicted: {_ms(timeline.seconds)} ms"
    return [
        f"{step}, of which {_ms(timeline.layer_seconds)} ms in the layers and {_ms(outside)} ms"
        " outside",
        exposed(timeline),
    ]


def exposed(timeline: "Timeline") -> str:
    """What of the copies no work hides, and what is waited for, as a sentence without its full
    stop.
    """
    if not timeline.exposed_seconds:
        return "exposed: nothing, work hides every copy"
    by = ", ".join(f"{name} {_ms(seconds)} ms" for name, seconds in timeline.exposed_by().items())
    share = f"{100 * timeline.exposed_share:.1f} % of the step"
    return f"exposed, which no work hides: {_ms(timeline.exposed_seconds)} ms, {share} ({by})"


def _lanes(one: Pass, longest: float) -> Iterator[str]:
    """A line for each lane on which something runs: a bar where it runs, and its milliseconds."""
    scale = COLUMNS / longest if longest else 0.0
    waits = one.exposed_by()
    late = one.work  # when the work, and all that runs beside it, is done
    for lane in LANES:
        seconds = one.of(lane)
        if not seconds and lane is not WORK:
            continue
        start = 0.0 if lane.beside else late
        late += 0.0 if lane.beside else seconds
        begin, end = round(scale * start), round(scale * (start + seconds))
        # What takes any time has a mark.
        bar = " " * min(begin, COLUMNS - 1) + "█" * max(end - begin, 1 if seconds else 0)
        wait = f", {_ms(waits[lane])} exposed" if lane in waits else ""
        yield f"    {lane.name:{_NAME - 3}}{bar:{COLUMNS}} {_ms(seconds):>8}{wait}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
