"""Names the host transfers of a compiled step, and adds up their bytes."""

import collections
import re
from collections.abc import Sequence

from jaxmem._planner.explain.names import Arguments, Saved
from jaxmem._result.memory.moved import Moved
from jaxmem._target.hlo.transfers import Transfer

ROWS = 15  # the most rows of a table that a reader can survey at once
# One step of a path: the root or a field, with an index if one follows, or a key.
_STEP = re.compile(r"(?:^|\.)[^.\[]+(?:\[\d+\])?|\[[^\]]*\]")

Key = tuple[str, bool, str, bool]  # a name, and the fields of `Moved` after it


def moved(
    transfers: Sequence[Transfer], arguments: Arguments, saved: Sequence[Saved]
) -> tuple[Moved, ...]:
    """Returns the host transfers of a compiled step. Transfers to the device are first, and in each
    direction the largest transfers are first.

    Arguments are named by their paths. If these would make more than `ROWS` rows, arrays whose
    paths have a common beginning share a row, such as one row for the tree of all layers.

    saved: the arrays that the step's blocks should save. Offloaded arrays are recognized by their
      bytes per layer.
    """
    paths = [_STEP.findall(arguments.name_of(t.argument)) if t.argument else [] for t in transfers]
    names = ["" if t.argument else _offloaded(t, saved) for t in transfers]
    rows: dict[Key, Moved] = {}
    for depth in range(max([1, *map(len, paths)]), 0, -1):
        cut = [name or "".join(path[:depth]) for name, path in zip(names, paths)]
        rows = _added_up(transfers, cut)
        if len(rows) <= ROWS:
            break
    return tuple(sorted(rows.values(), key=lambda m: (m.to_host, -m.bytes)))


def _added_up(transfers: Sequence[Transfer], names: Sequence[str]) -> dict[Key, Moved]:
    groups: dict[Key, list[Transfer]] = collections.defaultdict(list)
    for t, name in zip(transfers, names, strict=True):
        groups[name, t.to_host, t.how, t.in_loop].append(t)
    size = lambda group: sum(t.nbytes * t.runs for t in group)
    return {
        key: Moved(*key, size(group), size(t for t in group if t.products), len(group))
        for key, group in groups.items()
    }


def _offloaded(t: Transfer, saved: Sequence[Saved]) -> str:
    """The tags whose tensors the transfer may move; if there are none, the last word of the
    transfer's JAX operation.
    """
    of_size = dict.fromkeys(s.name for s in saved if s.host and s.bytes == t.nbytes)
    *first, last = of_size or [""]
    tags = f"{', '.join(first)} or {last}" if first else last
    return f"offloaded: {tags}" if tags else t.op.rpartition("/")[2] or "unnamed"
