"""What is in device memory over the schedule, by the parts that the table of the peak names."""

import collections
from collections.abc import Callable, Mapping

from jaxmem._planner.explain.names import Row, without
from jaxmem._result.memory.live import KINDS, Live, Series, phases
from jaxmem._target.buffers.held import Held, Peak

Place = Callable[[Held], tuple[str, str, str]]  # the kind, the part and the item of a buffer


def elsewhere(full: Peak) -> Peak:
    """Returns as a peak what the forward makes and the backward finds, but is gone, or not there
    yet, where memory is fullest: tags may have saved it.
    """
    history, at_peak = full.history, set(full.held)
    backward = [p for p in phases(history.ops, history.loops) if p.name == "backward"]
    # Right before a loop that goes back over layers, XLA may copy a stack into another layout.
    begins = [phase.first for phase in backward if phase.loop] or [p.first for p in backward[:1]]
    others = [life for life in history.lives if life.held not in at_peak]
    found = lambda life: any(life.first < at <= life.last for at in begins)
    held = dict.fromkeys(life.held for life in others if found(life))
    return Peak("transpose(", (), tuple(held))


def live(full: Peak, total: int, place: Place) -> Live | None:
    """Returns what is in device memory at each point of the schedule; None where XLA tells no
    history.

    full: what the compiled program holds.
    total: its bytes; parts never add up to more.
    place: names a buffer.
    """
    history = full.history
    if not history.ops:
        return None
    row: Callable[[Held], Row] = lambda h: (*place(h), h.bytes)
    # Arguments and outputs have their memory for the whole step.
    constant = [row(h) for h in full.held if not h.host and h.kind in ("argument", "output")]
    if (rest := total - sum(h.bytes for h in full.held if not h.host)) > 0:
        constant.append(("other", "not in the buffer assignment", "", rest))
    rows = [row(life.held) for life in history.lives]
    points: list[Mapping[tuple[str, str], int]] = []
    for at in range(len(history.ops)):
        here = constant + [r for r, x in zip(rows, history.lives) if x.first <= at <= x.last]
        excess = sum(size for *_, size in here) - total
        found: collections.Counter[tuple[str, str]] = collections.Counter()
        for kind, part, _, size in without(here, excess) if excess > 0 else here:
            found[kind, part] += size
        points.append(found)
    names = dict.fromkeys(name for point in points for name in point)
    parts = [Series(*name, tuple(point.get(name, 0) for point in points)) for name in names]
    parts.sort(key=lambda part: (KINDS.index(part.kind), -max(part.bytes)))
    return Live(history.moments, total, tuple(parts), phases(history.ops, history.loops))
