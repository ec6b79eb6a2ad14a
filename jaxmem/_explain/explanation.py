"""What holds a step's peak, as a value and as text."""

import dataclasses

from jaxmem._core.bytes import show_bytes

_SHOWN = 4  # items of a part in the table


@dataclasses.dataclass(frozen=True)
class Item:
    """Buffers of one name: their bytes together, and how many they are."""

    name: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Part:
    """One class of what is in memory. `kind` is one of `saved`, `untagged`, `arguments`, `outputs`,
    `gradients`,
    `layer`, `outside`, `other`, `packing`; `items` go from the largest to the smallest and add up
    to `bytes`."""

    kind: str
    name: str
    bytes: int
    items: tuple[Item, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What holds a compiled step's memory on one device when it is fullest.

    `parts` add up to `total_bytes`, which is temp + arguments + outputs - aliased; `host_parts` to
    the bytes in host memory. `peak_at` is the JAX operation that runs at the peak.
    """

    target: str
    plan: str
    total_bytes: int
    host_bytes: int
    peak_at: str
    parts: tuple[Part, ...]
    host_parts: tuple[Part, ...]
    advice: str

    def __str__(self) -> str:
        lines = [f"{show_bytes(self.total_bytes)} on {self.target}, {self.plan}"]
        if self.peak_at:
            lines.append(f"fullest {self.peak_at}")
        lines += ["", *_table(self.parts, self.total_bytes)]
        if self.host_parts:
            lines += ["", "in host memory:", *_table(self.host_parts, self.host_bytes)]
        return "\n".join([*lines, "", self.advice])


def _table(parts: tuple[Part, ...], total: int) -> list[str]:
    lines = ["       bytes       %  what"]
    for part in parts:
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
