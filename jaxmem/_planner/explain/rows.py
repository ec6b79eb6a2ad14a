"""Rows of what is in memory, one for each buffer, and how they are added up."""

import collections
from collections.abc import Iterable

from jaxmem._result.memory.explanation import Item, Part

Row = tuple[str, str, str, int]  # a kind, a part of it, an item of the part, and bytes

# Kinds, from the one that is named least surely.
UNSURE = (
    *("packing", "other", "outside", "layer", "gradients"),
    *("untagged", "saved", "outputs", "arguments"),
)


def without(rows: list[Row], excess: int) -> list[Row]:
    """Rows of (kind, part, item, bytes) less `excess` bytes in all, which several buffers are said
    to hold and XLA counts once. They are taken from what is named least surely.
    """
    kept = []
    for row in sorted(rows, key=lambda row: UNSURE.index(row[0])):
        taken = min(excess, row[3])
        excess -= taken
        kept += [(*row[:3], row[3] - taken)] if row[3] > taken else []
    return kept


def added_up(rows: Iterable[Row]) -> tuple[Part, ...]:
    """Rows, added up; the largest part and the largest items first."""
    grouped: dict[tuple[str, str], dict[str, list[int]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for kind, part, item, size in rows:
        grouped[kind, part][item].append(size)
    parts = []
    for (kind, name), found in grouped.items():
        items = sorted(
            (Item(item, sum(s), len(s)) for item, s in found.items()), key=lambda i: -i.bytes
        )
        parts.append(Part(kind, name, sum(i.bytes for i in items), tuple(items)))
    return tuple(sorted(parts, key=lambda p: -p.bytes))
