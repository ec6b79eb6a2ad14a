"""The types of what was learned of a step: its blocks, their tags and what each choice costs.

Bytes are int, times are seconds (float), both for one layer (one run of one block) unless a name
says otherwise.
"""

import dataclasses

from jaxmem._core.actions import KEEP, REST, Actions, Choice


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice open to a tag, with its price for one layer. Recomputation is not listed: it is
    always open, and its price depends on what else is kept.

    choice: the action, with its codec.
    device_bytes: what stays on the device until the backward.
    host_bytes: what crosses the host link once each way, and lies in host memory meanwhile.
    seconds: the device's time for writing, reading, encoding and decoding.
    doubt: by how many seconds a choice that loses accuracy must be faster, to be taken.
    lossy: whether it loses accuracy, where a choice that does not is open too.
    """

    choice: Choice
    device_bytes: int
    host_bytes: int
    seconds: float
    doubt: float = 0.0
    lossy: bool = False


@dataclasses.dataclass(frozen=True)
class Tag:
    """A named point of a block, where an action may apply.

    name: what plans call it. Where a name stands at several points of a block, each has a Tag of
      its own, and one decision holds for all of them.
    kind: what the tensor is, or None where the model does not say.
    shape, dtype: the tensor's; inside a loop of the block, those of one turn.
    value: the index in `BlockClass.values` of the tensor that is saved.
    options: the choices open to it, beside recomputation.
    turns: how many such tensors are saved, side by side: the trip counts of the loops of the block
      that it is made in.
    shards: over how many devices a tensor of that shape is divided; 1 inside `jax.shard_map`, where
      the shape is one device's.
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
    inputs: tuple[int, ...]  # indices in `BlockClass.values`, as those of `outputs`
    outputs: tuple[int, ...]
    seconds: float  # to repeat it once
    flops: float = 0.0  # of matrix products only, those of inner loops times their trip counts
    matmuls: int = 0  # matrix-product instructions in it
    tag: str | None = None  # set where the equation is a tag: its inputs and outputs are one tensor


@dataclasses.dataclass(frozen=True)
class BlockClass:
    """A `jax.checkpoint` region under our policy, and how often it repeats.

    The graph holds everything that the backward may need: `equations` in topological order over
    `values` (bytes of each). `needed` are the values that the backward reads; `inputs` those that
    enter the block and cost memory if anything reads them raw (never recomputed, Adacc eq. 6);
    `free` those in memory anyhow (parameters, constants).
    """

    name: str  # the policy's block label; classes of one label share their decisions
    fingerprint: str  # of the block's graph; equal for equal graphs
    layers: int  # how many instances' saved tensors are alive at once
    runs: int  # how many instances run in a step
    values: tuple[int, ...]
    inputs: tuple[int, ...]
    free: tuple[int, ...]
    needed: tuple[int, ...]
    equations: tuple[Equation, ...]
    tags: tuple[Tag, ...]
    forward_seconds: float = 0.0  # of what the backward needs, all of it kept
    backward_seconds: float = 0.0  # of the derivative alone
    flops: float = 0.0  # of the matrix products of both
    # of keeping each of `inputs` raw: its writing and reading; empty: nothing
    input_seconds: tuple[float, ...] = ()
    # how many layers the program loops over, where a plan may divide them into groups; a loop round
    # that loop makes `layers` a multiple of it
    divisible: int = 0
    shards: int = 1  # over how many devices a tensor is divided, whose shape is told whole

    @property
    def everything_bytes(self) -> int:
        """Bytes that one layer saves when everything that the backward needs is kept, as without a
        checkpoint. Parameters and constants are in memory anyhow, and do not count.
        """
        free = set(self.free)
        return sum(self.values[v] for v in self.needed if v not in free)

    def places(self, name: str) -> tuple[Tag, ...]:
        """The tags of this name, in the block's order."""
        return tuple(tag for tag in self.tags if tag.name == name)

    def tag_bytes(self, name: str) -> int:
        """Bytes of the tensors of this name together."""
        return sum(self.values[tag.value] for tag in self.places(name))


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was learned of a step on a target."""

    fingerprint: str  # of the blocks: what a plan is tied to
    blocks: tuple[BlockClass, ...]
    target: str
    link_bytes_per_second: float  # device to host and back, each way
    step_seconds: float  # a step under keep-everything, estimated
    time_source: str  # "measured" | "xla" | "roofline"
    idle_tags: tuple[str, ...] = ()  # tagged, but no backward reads them: any action is the same
    idle_blocks: tuple[str, ...] = ()  # labels of blocks that no gradient runs through: likewise
    unrolled: tuple[str, ...] = ()  # labels of blocks whose layers a Python loop repeats
    disturbed: float = 0.0  # share of the times that were measured while the machine was busy
    uncertainty: float = 0.0  # share by which work may take longer than its time says

    @property
    def everything_kept(self) -> Actions:
        """The assignment that makes the step as it is without a plan."""
        return {block.name: {REST: KEEP} for block in self.blocks}

    @property
    def everything_recomputed(self) -> Actions:
        """The assignment that keeps the blocks' inputs alone."""
        return {block.name: {} for block in self.blocks}
