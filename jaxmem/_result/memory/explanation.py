"""The result of `jaxmem.explain`, its text form, and its file."""

import dataclasses
import os
from collections.abc import Callable
from typing import Annotated, Any

from jaxmem._core.bytes import show_bytes
from jaxmem._core.files import read_json
from jaxmem._core.reader import Broken, Reader, named, one_of
from jaxmem._result.memory.live import KEY, KINDS, Live, chart
from jaxmem._result.memory.moved import Moved
from jaxmem._result.memory.moved import table as moved_table

_SHOWN = 4  # items of a part in the table


@dataclasses.dataclass(frozen=True)
class Item:
    """Buffers of one name.

    name: the path of an argument, or an operation and its result, such as "tanh f32[4,32]".
    bytes: bytes of all these buffers.
    count: number of these buffers.
    """

    name: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Part:
    """One class of buffers in memory.

    kind: `saved`, `untagged`, `arguments`, `outputs`, `gradients`, `layer`, `outside`, `other` or
      `packing`.
    name: the name of the class, such as "saved: up" for the tensors of the tag `up`.
    bytes: bytes of all items.
    items: the buffers of the class, the largest first.
    """

    kind: Annotated[str, one_of((*KINDS, "packing"))]
    name: str
    bytes: int
    items: tuple[Item, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The buffers that hold a compiled step's memory on one device, at the peak.

    target: the target that the step was compiled for.
    plan: "everything kept", "as written" or "under the plan".
    total_bytes: bytes in device memory: temporaries + arguments + outputs − aliased outputs.
    host_bytes: bytes in host memory: temporaries + arguments + outputs − aliased outputs.
    peak_at: the phase of the step and the JAX operation at the peak. "" if unknown.
    parts: the classes of buffers in device memory, the largest first. Their bytes add up to
      `total_bytes`.
    host_parts: the classes of buffers in host memory. Their bytes add up to `host_bytes`.
    advice: a sentence that names the kind with the most bytes, and what makes it smaller.
    live: the bytes in use over the schedule. None if XLA reports no history.
    beside: the explanation of the step with everything kept, if it was requested. Otherwise None.
    transfers: the host transfers of a step, to the device first, and the largest first. Only a
      GPU's program has transfers.
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
        """Returns the explanation as plain dicts, lists, texts and numbers."""
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
        is_single = len(part.items) == 1
        told = is_single and part.kind in ("saved", "untagged", "layer")
        one = f" ({_times(part.items[0])})" if told else ""
        lines.append(
            f"{show_bytes(part.bytes):>12}  {100 * part.bytes / total:5.1f}%  {part.name}{one}"
        )
        large = [i for i in part.items[:_SHOWN] if i.bytes >= 0.01 * total]
        shown = [] if is_single else large
        lines += [f"{'':23}{show_bytes(i.bytes):>10}  {_times(i)}" for i in shown]
        if shown and (rest := part.items[len(shown) :]):
            lines.append(
                f"{'':23}{show_bytes(sum(i.bytes for i in rest)):>10}  {sum(i.count for i in rest)}"
                " more"
            )
    return [*lines, f"{show_bytes(total):>12}  100.0%  together"]


def _times(item: Item) -> str:
    """The name of an item, with the number of equal buffers."""
    return f"{item.count} x {item.name}" if item.count > 1 else item.name


def load(path: str | os.PathLike) -> Explanation:
    """Reads an explanation that `jaxmem explain --json` printed, or that `Record.explained` wrote.
    Unknown fields are ignored, and fields that older versions lack may be missing.

    Raises PlanFileError, which names the field, if the file is broken.
    """
    wrote, mend = (
        "a file that jaxmem explain --json wrote",
        "explain the step anew, or mend the file",
    )
    with named("report:", path, wrote, mend):
        return _READER.read(Explanation, read_json(path))


def _explanation(value: Any, read: Callable[[Any], Explanation]) -> Explanation:
    """Reads an explanation. Its `beside` may be an explanation, whose own `beside` is null."""
    beside = value.get("beside") if isinstance(value, dict) else None
    if isinstance(beside, dict) and beside.get("beside") is not None:
        raise Broken(beside["beside"], "null", "beside.beside")
    return read(value)


def _live(value: Any, read: Callable[[Any], Live]) -> Live:
    """Reads the bytes in use over the schedule, and checks that phases and points are whole."""
    found = read(value)
    if not found.parts or not found.phases:
        raise Broken(value, "`parts` and `phases`, at least one of each")
    ends = [-1, *(phase.last for phase in found.phases)]
    for i, phase in enumerate(found.phases):
        if not ends[i] < phase.first <= phase.last or phase.first != ends[i] + 1:
            raise Broken(value["phases"][i], "points after those before it", f"phases[{i}]")
    for i, series in enumerate(found.parts):
        if len(series.bytes) != found.points:
            expected = f"a whole number for each of {found.points} points"
            raise Broken(len(series.bytes), expected, f"parts[{i}].bytes")
    return found


_READER = Reader(special={Explanation: _explanation, Live: _live})
