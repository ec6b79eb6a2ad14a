"""The parts of a plan: the rows of its table, its bytes by use, and the points of its curve."""

import dataclasses
import re
from typing import Annotated, Any

from jaxmem._core.actions import Actions, Choice
from jaxmem._core.reader import INT_LIMIT, Count, Valid

NAMED_ACTIONS = Annotated[Actions, Valid("an object: block -> tag -> action", bool)]
_KINDS = re.compile(r"[A-Z_]+(,[A-Z_]+)*")  # such as FUSION,CUBLAS
OPTION = Annotated[
    Any,
    Valid(
        "true, false or names in capital letters",
        lambda v: isinstance(v, bool) or (isinstance(v, str) and bool(_KINDS.fullmatch(v))),
    ),
]
_WORKING = Valid("a whole number", lambda v: type(v) is int and abs(v) < INT_LIMIT, instead=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """One tag's row of a plan's table. Bytes and milliseconds are for one layer on one device.

    block, tag: the label of the block, and the name of the tag.
    kind: the kind of the tensor. None if the tag has no kind.
    shape, dtype: the tensor's shape and dtype in the trace, before a mesh divides the tensor. In
      `jax.shard_map`, the shape of a device's part. For several tensors, the shape of the first
      tensor.
    choice: the action and the codec of the tag.
    bytes_before: bytes if the tensor is kept. For several tensors, the bytes of all of them.
    bytes_after: bytes on the device under `choice`. For several tensors, the bytes of all of them.
    milliseconds: the time that `choice` costs.
    why: the best other plan's choice for the tag and its cost, in words.
    layers: number of layers in which the tensor is alive at the same time.
    count: number of tensors of one layer in this row. Each occurrence of the name counts once
      for each iteration of the block's loops that contain the occurrence.
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
    layers: Count
    count: Count = 1

    @property
    def size(self) -> str:
        """The shape as a table shows it, such as `2 x (8, 1024)` for a name with two tensors."""
        shape = f"({', '.join(map(str, self.shape))})" if self.shape else "scalar"
        return f"{self.count} x {shape}" if self.count > 1 else shape


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Device bytes of a compiled step, by use.

    arguments: bytes of the step's arguments, such as model states and the batch.
    saved: bytes of tensors that the blocks save for the backward.
    working: all other bytes: the working memory of the head or of one block.
    """

    arguments: int
    saved: int
    working: Annotated[int, _WORKING]  # below 0 in files of earlier versions

    @staticmethod
    def of(total: int, arguments: int, saved: int) -> "Bytes":
        """Divides `total` bytes by use.

        Each part is at most the bytes that the parts before it leave. A compiled program may hold
        less than a plan saves, because XLA makes no copy of a tensor that is also an argument or a
        result.
        """
        arguments = min(max(0, arguments), total)
        saved = min(max(0, saved), total - arguments)
        return Bytes(arguments, saved, total - arguments - saved)


@dataclasses.dataclass(frozen=True)
class WrittenStep:
    """The step as its author wrote it, with its own checkpoints.

    bytes, host_bytes: compiled bytes on one device, and in host memory.
    seconds: seconds of one step, from the source that `Plan.baseline_source` names.
    parts: the bytes by use. The bytes of saved tensors are an estimate.
    """

    bytes: int
    host_bytes: int
    seconds: float
    parts: Bytes


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that ran on the device at hand for comparison, in alternation with other steps.

    name: the name of the step, in words.
    bytes: compiled bytes.
    lower, median, upper: quartiles of the step's seconds.
    rounds: number of runs.
    chosen: whether the step is the plan's step.
    """

    name: str
    bytes: int
    lower: float
    median: float
    upper: float
    rounds: Count
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Point:
    """One plan of the curve of least time against bytes. The values are predictions.

    bytes: bytes of the whole step on one device.
    seconds: seconds of a step.
    actions: the plan's actions, with every tag. Empty if the plan is from an older file without
      actions.
    uncertain_seconds: the uncertainty of the difference from everything kept, in seconds.
    """

    bytes: int
    seconds: float
    actions: NAMED_ACTIONS = dataclasses.field(default_factory=dict)
    uncertain_seconds: float = 0.0
