"""Finds the tensors that a block's backward reads and that no tag names, with their lines in the
user's program.

Untagged tensors are found from the trace, and only when a message names them. The alternative is to
store them in the profile. The solver decides nothing about them, so the profile does not hold them.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.blocks.segments import graph_of
from jaxmem._model.tags.named import is_tag
from jaxmem._trace.jaxpr import line_of, nbytes, per_device
from jaxmem._trace.primitives import VIEWS
from jaxmem._trace.rewrite import Node, Program

MOST_NAMED = 5  # tensors that a message names


@dataclasses.dataclass(frozen=True)
class Unnamed:
    """Tensors of one block, shape and line that no tag names.

    block: the block's label.
    array: dtype and shape of each, before a mesh divides it.
    primitives: JAX's names of the operations that make them.
    line: the user's file and line, "" where it is unknown.
    bytes: the sum over the tensors and over all layers, on one device.
    """

    block: str
    array: str
    primitives: tuple[str, ...]
    line: str
    bytes: int

    def __str__(self) -> str:
        many = f"{len(self.primitives)} x " if len(self.primitives) > 1 else ""
        names = ", ".join(dict.fromkeys(self.primitives))
        at = f" at {self.line}" if self.line else ""
        return f"{many}{self.array} ({names}){at}: {show_bytes(self.bytes)}"


def unnamed(jaxpr, shards: int = 1) -> list[Unnamed]:
    """Returns the tensors that the blocks of a step would save without a checkpoint, other than
    their tags and inputs, the largest first. A view or a cast of a tensor counts as that tensor.

    jaxpr: the step's, traced with every tag recomputed.
    shards: over how many devices each block's tensors are divided.
    """
    # By label, dtype and shape, and source line: the operations of one layer, and the bytes of all.
    found: dict[tuple[str, str, str], tuple[list[str], int]] = {}
    for instance in find_blocks(jaxpr.jaxpr).instances:
        here: dict[tuple[str, str, str], tuple[list[str], int]] = {}
        parts = 1 if instance.sharded else shards
        for equation, value in _values(instance):
            aval = instance.flat.avals[value]
            array = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
            key = instance.label, array, line_of(equation.eqn)
            primitives, size = here.get(key, ([], 0))
            size += instance.layers * per_device(nbytes(aval), parts)
            here[key] = [*primitives, equation.eqn.primitive.name], size
        for key, (primitives, size) in here.items():
            found[key] = primitives, size + found.get(key, ([], 0))[1]
    several = (
        Unnamed(label, array, tuple(primitives), line, size)
        for (label, array, line), (primitives, size) in found.items()
    )
    return sorted(several, key=lambda u: -u.bytes)


def listed(tensors: Sequence[Unnamed]) -> str:
    """The first `MOST_NAMED` of the tensors as one text, "" without any."""
    rest = f"; and {len(tensors) - MOST_NAMED} more" if len(tensors) > MOST_NAMED else ""
    return "; ".join(map(str, tensors[:MOST_NAMED])) + rest


def _values(instance) -> list[tuple[Node, int]]:
    """The values of one block that its backward reads, that no tag names, and that are neither
    inputs nor the same in every layer; each once, with the equation that makes it.
    """
    graph, flat = graph_of(instance), instance.flat
    made_by = {o: e for e in graph.equations for o in e.outputs}
    named = {_root(flat, made_by, v) for e in graph.equations if is_tag(e.eqn) for v in e.reads}
    roots = dict.fromkeys(_root(flat, made_by, v) for v in graph.needed)
    return [
        (made_by[v], v)
        for v in roots
        if v in made_by and v not in named and v not in graph.fixed and not is_tag(made_by[v].eqn)
    ]


def _root(flat: Program, made_by: dict[int, Node], value: int) -> int:
    """The value that `value` is a view or a cast of, or itself."""
    while (e := made_by.get(value)) is not None and e.eqn.primitive.name in VIEWS and e.reads:
        value = e.reads[0]
    return value
