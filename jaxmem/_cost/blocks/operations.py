"""Operations and values of a block's forward, those inside its loops and `jax.shard_map` too."""

import dataclasses

from jaxmem._model.tags.named import is_tag
from jaxmem._trace.jaxpr import JaxprEqn


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a block's forward: an equation of the block, or one of a loop in it.

    primitive: JAX's name of it; "turn" is what a turn of a loop takes over from the one before,
      "stack" what a loop or a `jax.shard_map` returns.
    reads, outputs: numbers of values: those of the block's flat jaxpr, and further ones for what is
      inside loops.
    whole: the index in `Graph.equations` of what it is, or is part of.
    share: its part of the time of that.
    flops, matmuls: of matrix products, those of all turns.
    eqn: JAX's equation; None for what has none of its own.
    turns: how many tensors of that shape its result is.
    looped: whether it is inside a loop.
    devices: how many of the devices that divide the block's tensors have such tensors each.
    """

    primitive: str
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    whole: int
    share: float = 1.0
    flops: float = 0.0
    matmuls: int = 0
    eqn: JaxprEqn | None = None
    turns: int = 1
    looped: bool = False
    devices: int = 1

    @property
    def tag(self) -> JaxprEqn | None:
        """The equation, where it is a tag."""
        return self.eqn if self.eqn is not None and is_tag(self.eqn) else None


@dataclasses.dataclass(frozen=True)
class Value:
    """A value inside a loop: its number, and the loops that it differs in the turns of, each by a
    number of its own. A `jax.shard_map` is a loop whose turns are the devices.
    """

    number: int
    loops: frozenset[int] = frozenset()
