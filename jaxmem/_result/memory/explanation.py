"""Holds what `explain` found, and shows it as text."""

import dataclasses
from typing import Any

from jaxmem._core.bytes import show_bytes
from jaxmem._result.memory.chart import KEY, chart
from jaxmem._result.memory.live import Live
from jaxmem._result.memory.moved import Moved
from jaxmem._result.memory.moved import table as moved_table

_SHOWN = 4  # items of a part in the table


@dataclasses.dataclass(frozen=True)
class Item:
    """Buffers of one name.

    name: an argument's path, or an operation and what it makes, such as "tanh f32[4,32]".
    bytes: those of all of them.
    count: how many they are.
    """

    name: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Part:
    """One class of what is in memory.

    kind: `saved`, `untagged`, `arguments`, `outputs`, `gradients`, `layer`, `outside`, `other` or
      `packing`.
    name: what it is, such as "saved: up" for the tensors of the tag `up`.
    bytes: those of all its items.
    items: what it is made of, the largest first.
    """

    kind: str
    name: str
    bytes: int
    items: tuple[Item, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What holds a compiled step's memory on one device when it is fullest.

    target: what the step was compiled for.
    plan: "everything kept", "as written" or "under the plan".
    total_bytes: temp + arguments + outputs - aliased, in device memory.
    host_bytes: the same in host memory.
    peak_at: the phase of the step and the JAX operation that runs at the peak; "" if unknown.
    parts: what is in device memory, the largest first; they add up to `total_bytes`.
    host_parts: what is in host memory; they add up to `host_bytes`.
    advice: what holds most, and what makes it smaller.
    live: what is in device memory over the schedule; None where XLA tells no history.
    beside: the step with everything kept, where that was compiled too; else None.
    transfers: what a step moves between device and host memory, to the device first, and the
      largest first; of a GPU's program alone, since a CPU's has one memory.
    """

    target: str
    plan: str
    total_bytes: int
    host_bytes: int
    peak_at: str
    parts: tuple[Part, ...]
    host_parts: tuple[Part, ...]
    advice: str
    live: Live | None = None
    beside: "Explanation | None" = None
    transfers: tuple[Moved, ...] = ()

    def __str__(self) -> str:
        lines = [f"{show_bytes(self.total_bytes)} on {self.target}, {self.plan}"]
        if self.peak_at:
            lines.append(f"fullest {self.peak_at}")
        lines += ["", *_table(self.parts, self.total_bytes)]
        if self.host_parts:
            lines += ["", "in host memory:", *_table(self.host_parts, self.host_bytes)]
        if self.transfers:
            lines += ["", *moved_table(self.transfers)]
        return "\n".join([*lines, *_charts(self), "", self.advice])

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain dicts, lists, texts and numbers."""
        return dataclasses.asdict(self)


def _charts(found: Explanation) -> list[str]:
    """The lines of a chart of live bytes, and of another one on its scale where there are two
    programs.
    """
    both = [one for one in (found, found.beside) if one is not None and one.live is not None]
    if not both:
        return []
    top = max(one.total_bytes for one in both)
    lines = []
    for one in both:
        assert one.live is not None
        lines += ["", f"bytes in use over the schedule, {one.plan}:", *chart(one.live, top)]
        if free := one.total_bytes - max(one.live.totals):
            lines.append(
                f"{show_bytes(free)} of {show_bytes(one.total_bytes)} are free even at the peak"
            )
    return [*lines, KEY]


def _table(parts: tuple[Part, ...], total: int) -> list[str]:
    """The lines of a table of `parts`, which add up to `total` bytes."""
    lines = ["       bytes       %  what"]
    for part in parts:
        # A part of a single item is shown in one line, others with their largest items below.
        one = (
            f" ({_times(part.items[0])})"
            if len(part.items) == 1 and part.kind in ("saved", "untagged", "layer")
            else ""
        )
        lines.append(
            f"{show_bytes(part.bytes):>12}  {100 * part.bytes / total:5.1f}%  {part.name}{one}"
        )
        shown = (
            [i for i in part.items[:_SHOWN] if i.bytes >= 0.01 * total]
            if len(part.items) > 1
            else []
        )
        lines += [f"{'':23}{show_bytes(i.bytes):>10}  {_times(i)}" for i in shown]
        if shown and (rest := part.items[len(shown) :]):
            lines.append(
                f"{'':23}{show_bytes(sum(i.bytes for i in rest)):>10}  {sum(i.count for i in rest)}"
                " more"
            )
    return [*lines, f"{show_bytes(total):>12}  100.0%  together"]


def _times(item: Item) -> str:
    return f"{item.count} x {item.name}" if item.count > 1 else item.name
