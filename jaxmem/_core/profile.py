"""The types of a profile: the blocks of a step, their tags, and the cost of each choice.

Bytes are int, times are seconds (float), both for one layer (one run of one block) unless a name
says otherwise.
"""

import dataclasses

from jaxmem._core.actions import KEEP, UNTAGGED, Actions, Choice


@dataclasses.dataclass(frozen=True)
class Option:
    """One possible choice for a tag, with its price for one layer. Recomputation is not listed: it
    is always possible, and its price depends on the other kept tensors.

    choice: the action, with its codec.
    device_bytes: bytes that stay in device memory until the backward.
    host_bytes: bytes in host memory until the backward. They cross the host link once each way.
    seconds: seconds of the device for writing, reading, encoding and decoding.
    host_seconds: the part of `seconds` that copies arrays between device and host memory.
    doubt: seconds by which a lossy choice must be faster to be taken.
    lossy: whether the choice loses accuracy, while a lossless choice is possible too.
    """

    choice: Choice
    device_bytes: int
    host_bytes: int
    seconds: float
    host_seconds: float = 0.0
    doubt: float = 0.0
    lossy: bool = False


@dataclasses.dataclass(frozen=True)
class Tag:
    """A named point of a block, where an action may apply.

    name: the name in plans. If several points of a block have one name, each has a Tag of its own,
      and one decision holds for all of them.
    kind: the kind of the tensor. None if the model names no kind.
    shape, dtype: the shape and the dtype of the tensor. Inside a loop of the block, the shape in
      one iteration.
    value: the index in `BlockClass.values` of the saved tensor.
    options: the possible choices, without recomputation.
    turns: number of saved tensors: the product of the trip counts of the block's loops that contain
      the point.
    shards: number of devices over which a tensor of the shape is divided. 1 inside `jax.shard_map`,
      where the shape is the shape of one device's part.
    """

    name: str
    kind: str | None
    shape: tuple[int, ...]
    dtype: str
    value: int
    options: tuple[Option, ...]
    turns: int = 1
    shards: int = 1


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation of a block's forward that the backward may have to repeat."""

    primitive: str  # JAX's name of the operation
    inputs: tuple[int, ...]  # indices in `BlockClass.values`, like the outputs
    outputs: tuple[int, ...]
    seconds: float  # to repeat the operation once
    flops: float = 0.0  # of matrix products only; in inner loops, times their trip counts
    matmuls: int = 0  # matrix-product instructions in it
    tag: str | None = None  # the name, if the equation is a tag: inputs and outputs are one tensor


@dataclasses.dataclass(frozen=True)
class BlockClass:
    """A `jax.checkpoint` region under our policy, and the number of its instances.

    The graph holds everything that the backward may need: `equations` in topological order over
    `values` (bytes of each value). `needed` are the values that the backward reads. `inputs` are
    the values that enter the block; they cost memory if an operation reads them raw (never
    recomputed, Adacc eq. 6). `free` are the values that are in memory in any case (parameters,
    constants).
    """

    name: str  # the policy's block label; classes of one label share their decisions
    fingerprint: str  # of the block's graph; equal for equal graphs
    layers: int  # number of instances whose saved tensors are alive at the same time
    runs: int  # number of instances that run in a step
    values: tuple[int, ...]
    inputs: tuple[int, ...]
    free: tuple[int, ...]
    needed: tuple[int, ...]
    equations: tuple[Equation, ...]
    tags: tuple[Tag, ...]
    forward_seconds: float = 0.0  # of the operations that the backward needs, all of them kept
    backward_seconds: float = 0.0  # of the derivative alone
    flops: float = 0.0  # of the matrix products of both
    # seconds to write and read each of `inputs`, if it is kept raw; empty for zero
    input_seconds: tuple[float, ...] = ()
    # number of layers that the program loops over, if a plan may divide them into groups; an outer
    # loop around that loop makes `layers` a multiple of this number
    divisible: int = 0
    shards: int = 1  # number of devices over which a tensor of whole shape is divided
    # How often the backward runs for each forward: twice if the step clips by the global norm. The
    # prices of the block are of one forward with all its backwards.
    backwards: int = 1
    # seconds of the whole forward of a layer, if a plan may run the layers in spans; None if not
    rerun_seconds: float | None = None
    # the label of the block that begins the iterations of this block's loop, if several blocks take
    # turns in the loop and this one does not begin; such blocks run in spans together
    loop: str = ""
    # of layers in spans: the bytes of the inputs of all spans, and the seconds of a step in which
    # the backward runs the spans forward again
    span_bytes: int = 0
    span_seconds: float = 0.0

    @property
    def everything_bytes(self) -> int:
        """Bytes that one layer saves if everything that the backward needs is kept, as without a
        checkpoint. Parameters and constants do not count: they are in memory in any case.
        """
        free = set(self.free)
        return sum(self.values[v] for v in self.needed if v not in free)

    def occurrences(self, name: str) -> tuple[Tag, ...]:
        """The tags of this name, in the block's order."""
        return tuple(tag for tag in self.tags if tag.name == name)

    def tag_bytes(self, name: str) -> int:
        """Bytes of the tensors of this name together."""
        return sum(self.values[tag.value] for tag in self.occurrences(name))


@dataclasses.dataclass(frozen=True)
class Profile:
    """The blocks of a step on a target, with bytes and seconds."""

    fingerprint: str  # of the blocks; a plan is for steps with this fingerprint
    blocks: tuple[BlockClass, ...]
    target: str
    link_bytes_per_second: float  # device to host and back, each way
    step_seconds: float  # a step under keep-everything, estimated
    time_source: str  # "measured" | "xla" | "roofline"
    idle_tags: tuple[str, ...] = ()  # tags that no backward reads: all actions are equal
    idle_blocks: tuple[str, ...] = ()  # labels of blocks without a gradient: all actions are equal
    unrolled: tuple[str, ...] = ()  # labels of blocks that follow each other without a loop
    disturbed: float = 0.0  # share of the times that were measured while the machine was busy
    uncertainty: float = 0.0  # error bound of the times, as a share
    overlap: float = 1.0  # share of a layer's work that runs beside its copies to and from the host

    @property
    def everything_kept(self) -> Actions:
        """The assignment under which the step runs as without a plan."""
        return {block.name: {UNTAGGED: KEEP} for block in self.blocks}

    @property
    def everything_recomputed(self) -> Actions:
        """The assignment that keeps only the inputs of the blocks."""
        return {block.name: {} for block in self.blocks}
