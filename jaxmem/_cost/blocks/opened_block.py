"""Opens the loops and the `jax.shard_map` of a block's forward that hold tags, so that tags inside
them are decided like the other tags of the block.

`jax.checkpoint` applies its policy inside a `lax.scan` too: it stacks the tensors that each
iteration saves, runs the loop again in the backward, and drops from that loop every operation whose
result nothing reads. So an operation of the loop's body is an operation of the block, and its
result has the bytes of all iterations. `jax.checkpoint` applies the policy inside a `jax.shard_map`
in the same way, and each device saves its part of a tensor.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from jaxmem._core.bytes import show_bytes
from jaxmem._core.warn import warn
from jaxmem._cost.blocks.loops import Builder, Operation
from jaxmem._cost.blocks.segments import BlockGraph
from jaxmem._trace.jaxpr import JaxprEqn, nbytes, per_device
from jaxmem._trace.rewrite import made_of


@dataclasses.dataclass(frozen=True)
class Opened:
    """A graph whose loops and `jax.shard_map` with tags are opened.

    graph: the block's graph, before loops are opened.
    axes: size by name of the mesh axes that divide the block's tensors. Empty for a block inside
      `jax.shard_map`, whose shapes are one device's.
    operations: in topological order.
    sizes: bytes by number of a value, over all iterations, before a mesh divides the value.
    needed: the values that the backward reads. A value without bytes stands for a carried value
      that the backward's own run of the loop reads.
    fixed: values that depend on no input.
    hidden: by tag that stands inside an equation that is not opened, the primitive of that and the
      tag's bytes; the primitive is "" where it stands in the backward alone.
    """

    graph: BlockGraph
    axes: Mapping[str, int]
    operations: tuple[Operation, ...]
    sizes: Mapping[int, int]
    needed: tuple[int, ...]
    fixed: frozenset[int]
    hidden: Mapping[str, tuple[str, int]]

    @property
    def label(self) -> str:
        """The block's label."""
        return self.graph.instance.label

    @property
    def shards(self) -> int:
        """The number of devices that divide the block's tensors, bytes and seconds."""
        return math.prod(self.axes.values())

    @property
    def tags(self) -> list[Operation]:
        """The operations that are tags."""
        return [o for o in self.operations if o.tag is not None]


def open_block(
    graph: BlockGraph,
    size_of: Callable[[Any], int] = nbytes,
    axes: Mapping[str, int] = MappingProxyType({}),
) -> Opened:
    """Opens every loop and `jax.shard_map` of the graph that holds a tag. A loop stays closed if an
    iteration reads a value that depends on a tag of the iteration before.

    size_of: bytes of a value.
    axes: size by name of the mesh axes that divide the step's batch.
    """
    axes = {} if graph.instance.sharded else axes
    closed: set[int] = set()
    while True:
        builder = Builder(graph, closed, size_of, axes)
        builder.prune()
        marks = builder.mark()
        cycles = builder.cycles()
        if tagged := [c for c in cycles if any(builder.operations[k].tag for k in c)]:
            closed.update(builder.operations[k].whole for c in tagged for k in c)
            continue
        operations = builder.ordered(cycles)
        fixed = made_of({*graph.instance.flat.constants, *builder.constants}, operations)
        return Opened(
            graph,
            axes,
            tuple(operations),
            builder.sizes,
            (*graph.needed, *marks),
            frozenset(fixed),
            _hidden(graph, operations, builder.tag_bytes),
        )


# By primitive: the context of a tag about which nothing is decided, and the remedy.
_CONTEXTS = {
    "scan": (
        "inside a loop of which each turn reads what the tag decides about in the turn before",
        "tag what the loop returns, or what it reads",
    ),
    "while": (
        "inside a while loop, of which JAX saves nothing",
        "write the loop as a jax.lax.scan, or tag what it returns",
    ),
    "cond": (
        "inside a branch of a conditional, whose branches share the memory of what they save",
        "tag what the conditional returns, or choose with jnp.where",
    ),
    "": (
        "where the block's backward alone runs it, such as in the backward of a custom derivative",
        "tag what the block's forward computes",
    ),
}


def hidden_tags(blocks: Iterable[Opened]) -> set[str]:
    """Returns the names of tags about which nothing is decided because of the operation around
    them, and warns once for each kind of operation.
    """
    hidden: dict[tuple[str, str], dict[str, int]] = {}
    for block in blocks:
        for name, (primitive, size) in block.hidden.items():
            hidden.setdefault((block.label, primitive), {})[name] = per_device(size, block.shards)
    for (label, primitive), names in sorted(hidden.items()):
        other = f"inside {primitive}", "tag what it returns, or what it reads"
        where, remedy = _CONTEXTS.get(primitive, other)
        sizes = (f"{name!r} ({show_bytes(size)} a layer)" for name, size in sorted(names.items()))
        warn(
            f"jaxmem: the tags {', '.join(sizes)} of block {label!r} stand"
            f" {where}: nothing is decided there. They are recomputed, unless a plan stores a"
            f" tensor of their name elsewhere in the block; {remedy}"
        )
    return set().union(*hidden.values())


def _hidden(
    graph: BlockGraph,
    operations: Iterable[Operation],
    tag_bytes: Callable[[JaxprEqn], Mapping[str, int]],
) -> dict[str, tuple[str, int]]:
    """The tags of `Opened.hidden`."""
    flat, boundary = graph.instance.flat, graph.instance.boundary
    decided = {o.params["name"] for o in operations if o.tag is not None}
    found = {}
    for e in flat.nodes[boundary:]:
        sizes = tag_bytes(e.eqn)
        found |= {name: ("", size) for name, size in sizes.items() if name not in decided}
    for o in operations:
        if o.eqn is not None and o.tag is None:
            times = o.turns * o.devices
            sizes = tag_bytes(o.eqn)
            found |= {name: (o.primitive, times * size) for name, size in sizes.items()}
    return found
