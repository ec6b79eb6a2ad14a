"""The bytes in device memory over the schedule, by the parts that the table of the peak names."""

import collections
from collections.abc import Callable, Mapping

from jaxmem._planner.explain.names import Row, without
from jaxmem._result.memory.live import KINDS, Live, Phase, Series, phases
from jaxmem._target.buffers.held_buffers import Held, Peak

Describe = Callable[[Held], tuple[str, str, str]]  # the kind, the part and the item of a buffer


def elsewhere(full: Peak) -> Peak:
    """Returns, as a `Peak`, the buffers that the forward makes, that are alive when the backward or
    one of its loops begins, and that are not alive at the peak of memory. Tags may have saved these
    buffers.
    """
    at_peak = set(full.held)
    backward = [p for p in _phases(full) if p.name == "backward"]
    # Right before the backward's loop over layers, XLA may copy a stack into another layout.
    begins = [phase.first for phase in backward if phase.loop] or [p.first for p in backward[:1]]
    others = [life for life in full.lives if life.held not in at_peak]
    is_alive = lambda life: any(life.first < at <= life.last for at in begins)
    buffers = dict.fromkeys(life.held for life in others if is_alive(life))
    return Peak("transpose(", (), tuple(buffers))


def _phases(full: Peak) -> tuple[Phase, ...]:
    """The phases of the points of a schedule."""
    return phases([op for op, _ in full.points], [loops for _, loops in full.points])


def live(full: Peak, total: int, describe: Describe) -> Live | None:
    """Returns the bytes in device memory at each point of the schedule; None if XLA reports no
    history.

    full: the buffers of the compiled program.
    total: the program's bytes. Parts add up to at most these bytes.
    describe: returns the kind, the part and the item of a buffer.
    """
    if not full.points:
        return None
    row: Callable[[Held], Row] = lambda h: (*describe(h), h.bytes)
    # Arguments and outputs have their memory for the whole step.
    constant = [row(h) for h in full.held if not h.host and h.kind in ("argument", "output")]
    if (rest := total - sum(h.bytes for h in full.held if not h.host)) > 0:
        constant.append(("other", "not in the buffer assignment", "", rest))
    rows = [row(life.held) for life in full.lives]
    points: list[Mapping[tuple[str, str], int]] = []
    for at in range(len(full.points)):
        alive = constant + [r for r, x in zip(rows, full.lives) if x.first <= at <= x.last]
        excess = sum(size for *_, size in alive) - total
        sizes: collections.Counter[tuple[str, str]] = collections.Counter()
        for kind, part, _, size in without(alive, excess) if excess > 0 else alive:
            sizes[kind, part] += size
        points.append(sizes)
    names = dict.fromkeys(name for point in points for name in point)
    parts = [Series(*name, tuple(point.get(name, 0) for point in points)) for name in names]
    parts.sort(key=lambda part: (KINDS.index(part.kind), -max(part.bytes)))
    return Live(full.moments, total, tuple(parts), _phases(full))
