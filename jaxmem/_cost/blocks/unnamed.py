"""Finds the tensors that a block's backward reads and that no tag names, with their lines in the
user's program.

Untagged tensors are found from the trace, and only when a message names them. The alternative is to
store them in the profile. The solver decides nothing about them, so the profile does not hold them.
"""

from collections.abc import Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.blocks.segments import graph_of
from jaxmem._model.tags.named import is_tag
from jaxmem._trace.jaxpr import line_of, nbytes, per_device
from jaxmem._trace.primitives import VIEWS
from jaxmem._trace.rewrite import Node, Program

MOST_NAMED = 5  # tensors that a message names


def unnamed(jaxpr, shards: int = 1, label: str | None = None) -> list[str]:
    """Returns the tensors that the blocks of a step would save without a checkpoint, other than
    their tags and inputs, as texts, the largest first. A view or a cast of a tensor counts as that
    tensor.

    The tensors of one block, shape and line of the user's program have one text: the number of the
    tensors, their dtype and shape before a mesh divides them, JAX's names of the operations that
    make them, the user's file and line, and the bytes of the tensors of all layers on one device.

    jaxpr: the step's, traced with every tag recomputed.
    shards: over how many devices each block's tensors are divided.
    label: the block's label; None for the tensors of all blocks.
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
    largest = sorted(found.items(), key=lambda item: -item[1][1])
    return [_text(*key[1:], *value) for key, value in largest if label in (None, key[0])]


def _text(array: str, line: str, primitives: Sequence[str], size: int) -> str:
    """The text of tensors of one shape and line. `line` is "" where it is unknown."""
    many = f"{len(primitives)} x " if len(primitives) > 1 else ""
    at = f" at {line}" if line else ""
    return f"{many}{array} ({', '.join(dict.fromkeys(primitives))}){at}: {show_bytes(size)}"


def listed(tensors: Sequence[str]) -> str:
    """The first `MOST_NAMED` of the tensors as one text, "" without any."""
    rest = f"; and {len(tensors) - MOST_NAMED} more" if len(tensors) > MOST_NAMED else ""
    return "; ".join(tensors[:MOST_NAMED]) + rest


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
