"""Layers of a Python loop: stretches of a program that repeat, cut where the fewest bytes cross."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxmem._model.layer.graph import LayerGraph, flops, uses_references
from jaxmem._trace.jaxpr import Literal, text_of
from jaxmem._trace.rewrite import Node, Program

SHORTEST = 4  # operations: what repeats faster is no layer
# Of parameters these say where a layer's share lies, or are addresses: equal layers differ in them.
_PLACES = {
    "start_indices", "limit_indices", "name", "sharding", "jvp_jaxpr_fun", "jvp_jaxpr_thunk",
    "fwd_jaxpr_thunk", "bwd", "debug_info",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Repeat:
    """`count` layers of `period` nodes each, the first of which begins at node `start`."""

    start: int
    period: int
    count: int

    def layers(self) -> Iterator[tuple[int, int]]:
        """The nodes of each layer: (start, stop)."""
        for i in range(self.count):
            yield self.start + i * self.period, self.start + (i + 1) * self.period


def repeats(program: Program) -> list[Repeat]:
    """The repeated stretches that hold products, in order: the one with most FLOPs first, then what
    is left of it and right of it.
    """
    kinds = _kinds(program)
    work = np.array([flops(node) for node in program.nodes])
    crossing = _crossing(program)

    def within(low: int, high: int) -> list[Repeat]:
        found = _longest(kinds[low:high], work[low:high])
        if found is None:
            return []
        start, period, length = found
        cut = _cut(low + start, period, length, work, crossing)
        return [*within(low, cut.start), cut, *within(cut.start + cut.period * cut.count, high)]

    return within(0, len(program.nodes))


def _kinds(program: Program) -> np.ndarray:
    """A number for each node, equal for equal operations on equal shapes."""
    known: dict[tuple, int] = {}
    return np.array([known.setdefault(_kind(program, n), len(known)) for n in program.nodes], int)


def _kind(program: Program, node: Node) -> tuple:
    if uses_references(node):
        return (id(node),)  # like no other: it is in no layer
    aval = lambda v: v.aval if isinstance(v, Literal) else program.avals[v]
    shapes = [(aval(v).str_short(), isinstance(v, Literal)) for v in node.inputs]
    results = [aval(v).str_short() for v in node.outputs]
    params = sorted((k, text_of(v)) for k, v in node.eqn.params.items() if k not in _PLACES)
    return node.primitive, str(shapes), str(results), str(params)


def _longest(kinds: np.ndarray, work: np.ndarray) -> tuple[int, int, int] | None:
    """(start, period, length) of the periodic stretch with most FLOPs; of equal ones the one with
    the shortest period.
    """
    total = np.concatenate([[0.0], np.cumsum(work)])
    best, found = 0.0, None
    for period in range(SHORTEST, len(kinds) // 2 + 1):
        equal = np.concatenate([[0], kinds[:-period] == kinds[period:], [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(equal))
        for start, stop in zip(edges[::2], edges[1::2]):
            count = (stop - start) // period + 1
            covered = total[start + count * period] - total[start]
            if count > 1 and covered > best * (1 + 1e-9) and total[start + period] > total[start]:
                best, found = covered, (int(start), period, int(stop - start) + period)
    return found


def _cut(start: int, period: int, length: int, work, crossing) -> Repeat:
    """The stretch in layers that begin where the fewest bytes cross, among the cuts that leave out
    the fewest FLOPs.
    """

    def layers(offset: int) -> Repeat:
        return Repeat(start + offset, period, (length - offset) // period)

    def rank(cut: Repeat) -> tuple:
        stop = cut.start + cut.count * period
        bytes_across = crossing[cut.start] + crossing[cut.start + period]
        return -round(float(work[cut.start : stop].sum() / max(work.sum(), 1)), 3), bytes_across

    offsets = range(min(period, length - 2 * period + 1))
    return min(map(layers, offsets), key=rank)


def _crossing(program: Program) -> np.ndarray:
    """By position, the bytes that nodes before it made and nodes from it on read."""
    graph = LayerGraph(program, ())
    last = {v: i for i, node in enumerate(program.nodes) for v in node.reads}
    last |= dict.fromkeys(graph.outputs, len(program.nodes))
    change = np.zeros(len(program.nodes) + 2)
    for v, i in graph.order.items():
        if i >= 0 and last.get(v, -1) > i:
            change[i + 1] += graph.bytes(v)
            change[last[v] + 1] -= graph.bytes(v)
    return np.cumsum(change)


def between(program: Program, layers: Sequence[tuple[int, int]]) -> list[list[int]]:
    """By layer, the values that it takes from the layer before: its activations.

    They are found in the second layer, and are at the same places in the others.
    """
    nodes = program.nodes
    (start, stop), (second, end) = layers[:2]
    before = {v for node in nodes[start:stop] for v in node.outputs}
    graph = LayerGraph(program, ())
    places = [
        (i, j)
        for i, node in enumerate(nodes[second:end])
        for j, v in enumerate(node.inputs)
        if isinstance(v, int) and v in before and graph.inexact(v)
    ]
    taken = ([nodes[low + i].inputs[j] for i, j in places] for low, _ in layers)
    return [list(dict.fromkeys(v for v in each if isinstance(v, int))) for each in taken]


def part(program: Program, low: int, high: int) -> Program:
    """Nodes `low` to `high` as a program of what they read and what is read of them later."""
    nodes = program.nodes[low:high]
    inside = {v for node in nodes for v in node.outputs}
    reads = dict.fromkeys(v for node in nodes for v in node.reads if v not in inside)
    later = {v for node in program.nodes[high:] for v in node.reads}
    later |= {v for v in program.outputs if isinstance(v, int)}
    outputs = tuple(v for node in nodes for v in node.outputs if v in later)
    inputs = tuple(v for v in reads if v not in program.constants)
    return dataclasses.replace(program, nodes=nodes, inputs=inputs, outputs=outputs)
