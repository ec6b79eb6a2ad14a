"""The parts of a plan: its table's rows, its bytes by what they hold, the points of its curve."""

import dataclasses

from jaxmem._core.actions import Actions, Choice


@dataclasses.dataclass(frozen=True)
class Row:
    """One tag's line of the table. Bytes and milliseconds are those of one layer on one device.

    block, tag: the labels under which the choice stands.
    kind: what the tensor is, or None where the tag does not say.
    shape, dtype: the tensor's as traced: before a mesh divides it, but for a part in shard_map; of
      several tensors, the first one's.
    choice: what becomes of it.
    bytes_before: what it takes when it is kept; of several tensors, what all of them take.
    bytes_after: what it takes on the device under the choice, likewise.
    milliseconds: what the choice costs.
    why: what the best other plan does with the tensor, in words.
    layers: in how many layers the tensor is alive at once.
    count: how many tensors of one layer the line is of: the places of the name, each times the
      turns of the loops of the block that it is made in.
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
    count: int = 1

    @property
    def size(self) -> str:
        """The shape as a table shows it, such as `2 x (8, 1024)` for a name of two places."""
        shape = f"({', '.join(map(str, self.shape))})" if self.shape else "scalar"
        return f"{self.count} x {shape}" if self.count > 1 else shape


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
class WrittenStep:
    """The step as its author wrote it, where it has checkpoints of its own.

    bytes, host_bytes: what it takes on one device and in host memory, as compiled.
    seconds: those of one step, from the source that `Plan.baseline_source` names.
    parts: its bytes by what they hold; what it saves is estimated.
    """

    bytes: int
    host_bytes: int
    seconds: float
    parts: Bytes


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that was run beside others, in turns, on the device at hand.

    name: what it is, in words.
    bytes: what it takes, as compiled.
    lower, median, upper: quartiles of its seconds.
    rounds: how often it was run.
    chosen: whether it is the plan.
    """

    name: str
    bytes: int
    lower: float
    median: float
    upper: float
    rounds: int
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan that was solved for: bytes of the whole step on one device, and seconds of a step,
    both predicted.

    actions: the plan's, every tag named; empty where an older file does not say.
    uncertain_seconds: by how much its difference from everything kept may be off.
    """

    bytes: int
    seconds: float
    actions: Actions = dataclasses.field(default_factory=dict)
    uncertain_seconds: float = 0.0
