"""The host transfers of a step: the rows, and their table as text."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from jaxmem._core.bytes import show_bytes
from jaxmem._core.reader import one_of

DIRECTIONS = {False: "to the device", True: "to host memory"}
HOW = {"dma": "by DMA", "kernel": "by kernels", "stack": "within host memory"}


@dataclasses.dataclass(frozen=True)
class Moved:
    """Host transfers with one name, one direction and one method.

    Either all of these transfers are in loops, or none is.

    name: the name of the transferred data: the path of an argument, or of the tree that holds
      several arguments; the tags that are offloaded; or the JAX operation of the transfer.
    to_host: whether the transfer goes to host memory. Otherwise it goes to the device.
    how: the method. "dma" is a copy by DMA. "kernel" means that kernels read or write host memory.
      "stack" is a copy of an array within host memory.
    in_loop: whether the transfer is in a loop, such as the loop over layers.
    bytes: bytes in one step.
    beside: the part of `bytes` during whose transfer a matrix product starts.
    count: number of operations of the compiled program that transfer the data.
    """

    name: str
    to_host: bool
    how: Annotated[str, one_of(HOW)]
    in_loop: bool
    bytes: int
    beside: int
    count: int


def by_direction(moved: Sequence[Moved]) -> list[tuple[str, list[Moved]]]:
    """The rows to the device, and the rows to host memory, under the names of the directions.
    Directions without rows are left out.
    """
    both = [(DIRECTIONS[way], [m for m in moved if m.to_host == way]) for way in DIRECTIONS]
    return [(name, rows) for name, rows in both if rows]


def share_beside(rows: Sequence[Moved]) -> str:
    """The share of the bytes during whose transfer matrix products start, such as "97%"."""
    total = sum(m.bytes for m in rows)
    return f"{100 * sum(m.beside for m in rows) / total:.0f}%" if total else "–"


def way_of(row: Moved) -> str:
    """The method of a row's transfers, and whether they are in a loop."""
    return f"{HOW[row.how]}, {'in loops' if row.in_loop else 'once'}"


def table(moved: Sequence[Moved]) -> list[str]:
    """The lines of a table. Empty without transfers."""
    if not moved:
        return []
    width = max(len(way_of(m)) for m in moved)
    lines = ["moved in a step, and the share of it beside matrix products:"]
    for name, rows in by_direction(moved):
        lines.append(f"{name:>15}  beside  how and what")
        for row in rows:
            size, share = show_bytes(row.bytes), share_beside([row])
            lines.append(f"{size:>15}  {share:>6}  {way_of(row):{width}}  {row.name}")
        total = show_bytes(sum(row.bytes for row in rows))
        lines.append(f"{total:>15}  {share_beside(rows):>6}  together")
    return lines
