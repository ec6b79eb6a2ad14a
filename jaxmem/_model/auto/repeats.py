"""Finds the stretches of a program that repeat, and stretches that are equal: such stretches are
layers.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from jaxmem._model.auto.pieces import Values
from jaxmem._model.layer.graph import LayerGraph, flops, has_effects
from jaxmem._trace.jaxpr import Literal, text_of
from jaxmem._trace.rewrite import Node, Program

Ends = list[tuple[int, int]]  # the first node of each layer, and the node after its last one
SHORTEST = 4  # operations: a shorter stretch that repeats is not a layer
# Equal layers differ in these parameters: they say where a layer's share is stored, or are
# addresses.
_ADDRESSES = {
    "start_indices", "limit_indices", "name", "sharding", "jvp_jaxpr_fun",
    "fwd_jaxpr_thunk", "bwd", "debug_info",
}  # fmt: skip


def repeats(
    program: Program, shortest: int = SHORTEST, kinds: np.ndarray | None = None
) -> list[range]:
    """Returns the repeated stretches with matrix products, in order. A stretch is the range of the
    first nodes of its layers; the step of the range is the number of nodes of a layer, at least
    `shortest`. The stretch with most FLOPs is found first, then stretches before and after it.

    kinds: a number for each node, equal for equal operations; None for `kinds_of`.
    """
    kinds = kinds_of(program) if kinds is None else kinds
    work = np.array([flops(node) for node in program.nodes])
    crossing = Values(program, ()).crossing(0, len(program.nodes))

    def within(low: int, high: int) -> list[range]:
        found = _longest(kinds[low:high], work[low:high], shortest)
        if found is None:
            return []
        start, period, length = found
        cut = _cut(low + start, period, length, work, crossing)
        return [*within(low, cut.start), cut, *within(cut.stop, high)]

    return within(0, len(program.nodes))


def kinds_of(program: Program, apart: Collection[int] = ()) -> np.ndarray:
    """Returns a number for each node. Equal operations on equal shapes have equal numbers.

    apart: positions of nodes that are unlike all others.
    """
    known: dict[tuple, int] = {}
    key = lambda i: (i,) if i in apart else _kind(program, program.nodes[i])
    return np.array([known.setdefault(key(i), len(known)) for i in range(len(program.nodes))], int)


def _kind(program: Program, node: Node) -> tuple:
    """Returns a key of a node: equal for equal operations on equal shapes."""
    if has_effects(node):
        return (id(node),)  # unlike all other nodes, so that it is in no layer
    aval = lambda v: v.aval if isinstance(v, Literal) else program.avals[v]
    shapes = [(aval(v).str_short(), isinstance(v, Literal)) for v in node.inputs]
    results = [aval(v).str_short() for v in node.outputs]
    params = sorted((k, text_of(v)) for k, v in node.eqn.params.items() if k not in _ADDRESSES)
    return node.primitive, str(shapes), str(results), str(params)


def _longest(kinds: np.ndarray, work: np.ndarray, shortest: int) -> tuple[int, int, int] | None:
    """Returns (start, period, length) of the periodic stretch with most FLOPs. If several have
    equally many FLOPs, it is the stretch with the shortest period.
    """
    total = np.concatenate([[0.0], np.cumsum(work)])
    best, found = 0.0, None
    for period in range(shortest, len(kinds) // 2 + 1):
        equal = np.concatenate([[0], kinds[:-period] == kinds[period:], [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(equal))
        for start, stop in zip(edges[::2], edges[1::2]):
            count = (stop - start) // period + 1
            covered = total[start + count * period] - total[start]
            if count > 1 and covered > best * (1 + 1e-9) and total[start + period] > total[start]:
                best, found = covered, (int(start), period, int(stop - start) + period)
    return found


def _cut(start: int, period: int, length: int, work, crossing) -> range:
    """Cuts a stretch into layers where the fewest bytes cross, among the cuts that leave out the
    fewest FLOPs.
    """

    def layers(offset: int) -> range:
        first, count = start + offset, (length - offset) // period
        return range(first, first + count * period, period)

    def rank(cut: range) -> tuple:
        bytes_across = crossing[cut.start] + crossing[cut.start + period]
        return -round(float(work[cut.start : cut.stop].sum() / max(work.sum(), 1)), 3), bytes_across

    offsets = range(min(period, length - 2 * period + 1))
    return min(map(layers, offsets), key=rank)


def between(program: Program, layers: Ends) -> list[list[int]]:
    """Returns for each layer its activations: the values that it takes from the previous layer.

    They are found in the second layer, and have the same positions in the other layers.
    """
    nodes = program.nodes
    (start, stop), (second, end) = layers[:2]
    before = {v for node in nodes[start:stop] for v in node.outputs}
    graph = LayerGraph(program, ())
    read = [
        (i, j)
        for i, node in enumerate(nodes[second:end])
        for j, v in enumerate(node.inputs)
        if isinstance(v, int) and v in before and graph.inexact(v)
    ]
    taken = ([nodes[low + i].inputs[j] for i, j in read] for low, _ in layers)
    return [list(dict.fromkeys(v for v in each if isinstance(v, int))) for each in taken]


def equal_stretches(program: Program, kinds: np.ndarray, stretches: Iterable[range]) -> list[Ends]:
    """Returns the ends of stretches of a program, equal stretches in one list, in order.

    kinds: as for `repeats`.
    """
    equal: dict[tuple, Ends] = {}
    for s in sorted(stretches, key=lambda stretch: stretch.start):
        key = (*kinds[s.start : s.stop], *_wiring(program.nodes[s.start : s.stop]))
        equal.setdefault(key, []).append((s.start, s.stop))
    return [*equal.values()]


def _wiring(nodes: Sequence[Node]) -> list[int]:
    """Returns a number for each value that nodes read and make, in the order of the first uses."""
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(v, len(numbers)) if isinstance(v, int) else -1
        for node in nodes
        for v in (*node.inputs, *node.outputs)
    ]
