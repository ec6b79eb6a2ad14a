"""Names what a compiled step moves between device and host memory, and adds it up."""

import collections
import re
from collections.abc import Sequence

from jaxmem._planner.explain.names import Arguments, Saved
from jaxmem._result.memory.moved import Moved
from jaxmem._target.hlo.transfers import Transfer

ROWS = 15  # of a table that is taken in at a glance
# Of a path: its root or a field, with a number if one follows, or a key.
_STEP = re.compile(r"(?:^|\.)[^.\[]+(?:\[\d+\])?|\[[^\]]*\]")

Key = tuple[str, bool, str, bool]  # a name, and the fields of `Moved` after it


def moved(
    found: Sequence[Transfer], arguments: Arguments, saved: Sequence[Saved]
) -> tuple[Moved, ...]:
    """Returns a compiled step's transfers, those to the device first, and the largest first.

    Arguments stand under their paths. Where these would be more than `ROWS` rows, what paths have
    in common stands for the arrays below it: one row for a whole tree of layers.

    saved: what the step's blocks should save; what goes to the host is found by its bytes a layer.
    """
    paths = [_STEP.findall(arguments.name_of(t.argument)) if t.argument else [] for t in found]
    names = ["" if t.argument else _offloaded(t, saved) for t in found]
    rows: dict[Key, Moved] = {}
    for depth in range(max(map(len, paths), default=0), 0, -1):
        cut = [name or "".join(path[:depth]) for name, path in zip(names, paths)]
        rows = _added_up(found, cut)
        if len(rows) <= ROWS:
            break
    rows = rows or _added_up(found, names)
    return tuple(sorted(rows.values(), key=lambda m: (m.to_host, -m.bytes)))


def _added_up(found: Sequence[Transfer], names: Sequence[str]) -> dict[Key, Moved]:
    groups: dict[Key, list[Transfer]] = collections.defaultdict(list)
    for t, name in zip(found, names, strict=True):
        groups[name, t.to_host, t.how, t.in_loop].append(t)
    size = lambda transfers: sum(t.nbytes * t.runs for t in transfers)
    return {
        key: Moved(*key, size(group), size(t for t in group if t.products), len(group))
        for key, group in groups.items()
    }


def _offloaded(t: Transfer, saved: Sequence[Saved]) -> str:
    """The tags whose tensors a transfer may carry, else the last word of its JAX operation."""
    of_size = dict.fromkeys(s.name for s in saved if s.host and s.bytes == t.nbytes)
    *first, last = of_size or [""]
    tags = f"{', '.join(first)} or {last}" if first else last
    return f"offloaded: {tags}" if tags else t.op.rpartition("/")[2] or "unnamed"
