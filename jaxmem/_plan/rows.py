"""The parts of a plan: its table's rows, its bytes by what they hold, the points of its curve."""

import dataclasses

from jaxmem._core.actions import Choice


@dataclasses.dataclass(frozen=True)
class Row:
    """One tag's line of the table. Bytes and milliseconds are those of one layer on one device.

    block, tag: the labels under which the choice stands.
    kind: what the tensor is, or None where the tag does not say.
    shape, dtype: the tensor's as traced: before a mesh divides it, but for a part in shard_map.
    choice: what becomes of it.
    bytes_before: what it takes when it is kept.
    bytes_after: what it takes on the device under the choice.
    milliseconds: what the choice costs.
    why: what the best other plan does with the tensor, in words.
    layers: how many of such tensors are alive at once.
    """

    block: str
    tag: str
    kind: str | None
    shape: tuple[int, ...]
    dtype: str
    choice: Choice
    bytes_before: int
    bytes_after: int
    milliseconds: float
    why: str
    layers: int = 1


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Device bytes of a compiled step by what they hold.

    arguments: the step's arguments, such as model states and the batch.
    saved: what the blocks save for the backward.
    working: what neither of the others accounts for.
    """

    arguments: int
    saved: int
    working: int

    @staticmethod
    def of(total: int, arguments: int, saved: int) -> "Bytes":
        """`total` bytes by what holds them. Each part is at most what the ones before it leave,
        since a compiled program may hold less than a plan saves: XLA keeps no copy of a tensor that
        is an argument or a result anyhow.
        """
        arguments = min(max(0, arguments), total)
        saved = min(max(0, saved), total - arguments)
        return Bytes(arguments, saved, total - arguments - saved)


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan that was solved for: bytes of the whole step on one device, and seconds of a step,
    both predicted.
    """

    bytes: int
    seconds: float
