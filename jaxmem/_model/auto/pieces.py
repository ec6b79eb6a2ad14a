"""Cuts the operations of a program that do not repeat into pieces, and layers that repeat together
into the single layers. A piece is a layer for itself.

The levels of a U-Net, the first blocks of a ResNet's stages, and the layers of a network of unequal
widths are pieces. The values that cross the ends of a piece are saved, and the backward recomputes
one piece at a time. So the cuts minimize the bytes of the values that cross them plus the bytes of
the largest piece, as checkpoints of equal layers do (Chen et al. 2016, section 4.2: √n layers in a
piece).
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from jaxmem._model.layer.graph import aval_bytes, flops, is_inexact, shape_of, views_of
from jaxmem._trace.jaxpr import as_closed, inside
from jaxmem._trace.primitives import COSTLY
from jaxmem._trace.rewrite import Node, Program, leading_to, program_of
from jaxmem._trace.vary import axes_of, varying

MOST_CUTS = 400  # positions at which one stretch may be cut
MOST_PARTS = 16  # of a layer that repeats
ALIKE = 0.6  # of the primitives of two parts: parts with more in common are nearly alike
ENDS = 1  # of parts, inside a layer of attention and an MLP
GAIN = 0.8  # of the bytes before a division at any ends: the division must save more
NEARLY = 1.1  # times the fewest bytes: the fewest parts with at most these bytes are taken
SLACK = 0.01  # of the bytes across the ends of layers: keys and counters of later parts
SIZES = 24  # sizes of the largest piece that are tried
SHARE = 0.1  # of a program's FLOPs, or bytes: pieces with less of both get no decisions


class Values:
    """The values that a program's nodes make, and the values within each node together.

    made: the position of the node that makes each value.
    read: the position of the last node that reads it; the number of nodes for an output; the node
      itself for the values within it.
    bytes: its bytes.
    within: the bytes of the values within each node.
    """

    def __init__(self, program: Program, views: Iterable[Node]):
        """views: nodes whose results are left out."""
        nodes = program.nodes
        without = {v for node in views for v in node.outputs}
        last = {v: i for i, node in enumerate(nodes) for v in node.reads}
        last |= {v: len(nodes) for v in program.outputs if isinstance(v, int)}
        rows = [
            (i, last[v], aval_bytes(program.avals[v]))
            for i, node in enumerate(nodes)
            for v in node.outputs
            if v in last and v not in without
        ]
        self.within = [*map(_bytes_within, nodes)]
        rows += [(i, i, held) for i, held in enumerate(self.within) if held]
        self.made, self.read, self.bytes = np.array(rows, int).reshape(-1, 3).T

    def total(self) -> int:
        """Returns the bytes of the values, without those within nodes."""
        return int(self.bytes[self.made < self.read].sum())

    def inside(self, low: int, high: int) -> int:
        """Returns the bytes of the values that nodes `low` to `high` make, and nothing after them
        reads.
        """
        return int(self.bytes[(self.made >= low) & (self.read < high)].sum())

    def crossing(self, low: int, high: int) -> np.ndarray:
        """Returns, for each position from `low` to `high`, the bytes of the values that are made
        from `low` on and read after the position.
        """
        change = np.zeros(high - low + 2, int)
        own = (self.made >= low) & (self.made < high)
        np.add.at(change, self.made[own] + 1 - low, self.bytes[own])
        np.add.at(change, np.minimum(self.read[own], high) + 1 - low, -self.bytes[own])
        return np.cumsum(change)[:-1]


class Cuts:
    """The ways to cut a stretch of a program.

    positions: where it may be cut, with its ends.
    across: `across[i, j]` are the bytes that are made between cuts i and j and cross cut j.
    inside: `inside[i, j]` are the bytes that are made between them and do not cross cut j.
    has_product: whether a matrix product is between them. A piece has one.
    """

    def __init__(self, values: Values, work: np.ndarray, positions: Sequence[int], turns: int = 1):
        """work: the FLOPs of the program's nodes.
        turns: the number of iterations of the loop that the program is an iteration of, or 1.
        """
        self.positions, high = np.asarray(positions), positions[-1]
        count = len(self.positions)
        # By the cut before a value is made, and the first cut after it is read.
        own = (values.made >= positions[0]) & (values.made < high)
        place = lambda at: np.searchsorted(self.positions, at[own], side="right")
        table = np.zeros((count + 1, count + 1))
        np.add.at(table, (place(values.made), place(values.read)), values.bytes[own])
        before = np.cumsum(np.cumsum(table, axis=0), axis=1)
        i, j = np.arange(count)[:, None], np.arange(count)[None]
        self.inside = before[j, j] - before[i, j]
        self.across = before[j, count] - before[i, count] - self.inside
        products = np.concatenate([[0], np.cumsum(work > 0)])[self.positions]
        self.has_product = products[j] > products[i]
        if high == len(work) and turns == 1:
            self.across[:, -1] = 0  # the end of the program

    def best(self, largest: float) -> tuple[float, list[range]]:
        """Returns the pieces of at most `largest` bytes inside with the fewest bytes across their
        ends, and these bytes: infinitely many if there are no such pieces.
        """
        least = np.zeros(len(self.positions))
        begin = np.zeros(len(self.positions), int)
        for j in range(1, len(least)):
            fits = self.has_product[:j, j] & (self.inside[:j, j] <= largest)
            total = np.where(fits, least[:j] + self.across[:j, j], np.inf)
            begin[j] = np.argmin(total)
            least[j] = total[begin[j]]
        ends = [len(least) - 1]
        while ends[-1]:
            ends.append(int(begin[ends[-1]]))
        cuts = self.positions[ends[::-1]].tolist()
        return float(least[-1]), [range(*ends) for ends in itertools.pairwise(cuts)]


def cut_positions(values: Values, work: np.ndarray, stretch: range) -> list[int]:
    """Returns where a stretch may be cut: its ends, the positions after matrix products, and the
    positions where fewer bytes cross than before.
    """
    low, high = stretch.start, stretch.stop
    crossing = values.crossing(low, high)
    found = np.union1d(np.flatnonzero(np.diff(crossing) < 0), np.flatnonzero(work[low:high]))
    found = found[found < high - low - 1] + 1
    found = np.sort(found[np.argsort(crossing[found], kind="stable")][:MOST_CUTS])
    return [low, *(low + found).tolist(), high]


def pieces(
    program: Program, stretches: Sequence[range], repeated: int = 0, turns: int = 1
) -> list[range]:
    """Returns the pieces of a program, in order. None are returned if they have less than `SHARE`
    of its FLOPs, and less of the bytes of its values; or fewer bytes inside than a layer that
    repeats.

    The end of the program is no piece: the backward begins with it, and would compute it at once
    again. The end of a loop's iteration may be a piece: other iterations run before the backward.

    stretches: the nodes that pieces may have.
    repeated: the most bytes inside a layer that repeats, of this program or beside it. One of them
      is recomputed at a time, as a piece is.
    turns: the number of iterations of the loop that the program is an iteration of, or 1.
    """
    values = Values(program, views_of(program, program.inputs))
    work = np.array([flops(node) for node in program.nodes])
    with_products = (s for s in stretches if work[s.start : s.stop].any())
    tables = [Cuts(values, work, cut_positions(values, work, s), turns) for s in with_products]
    sizes = [t.inside[t.has_product & (t.inside > 0)] for t in tables]
    if not any(len(s) for s in sizes):
        return []
    every = np.concatenate(sizes)
    tried = [max(size, repeated) for size in np.geomspace(every.min(), every.max(), SIZES)]
    bytes_of = lambda size: size + turns * sum(t.best(size)[0] for t in tables)
    size = min(tried, key=bytes_of)
    last = len(work) - (turns == 1)  # the largest end of a piece
    found = [piece for t in tables for piece in t.best(size)[1] if piece.stop <= last]
    of_work = sum(work[p.start : p.stop].sum() for p in found) >= SHARE * work.sum()
    inside = sum(values.inside(p.start, p.stop) for p in found)
    of_bytes = inside >= SHARE * values.total()
    return found if 2 * inside > repeated and (of_work or of_bytes) else []


def divided(
    program: Program,
    layers: Sequence[tuple[int, int]],
    carried: Sequence[int] = (),
    turns: int = 1,
) -> list[range]:
    """Returns the parts of layers, in order, if each layer that repeats is several layers in turns,
    such as local and global attention, or a state-space layer and attention; none for other layers.

    No more bytes cross the ends of the parts than cross the ends of layers, and each part has
    matrix products. The backward recomputes one part at a time, and the values across the ends of
    parts are kept. So the largest part is divided as long as the division reduces the bytes of both
    together. A part is divided into parts that are nearly alike. If no such parts are found, it is
    divided at any of its ends, unless it has `ENDS` ends or fewer, as attention and an MLP have.

    layers: the ends of the layers. An iteration of a scan is one layer, the whole program.
    carried: the activations that the scan carries.
    turns: the number of iterations.
    """
    nodes, values = program.nodes, Values(program, views_of(program, program.inputs))
    crossing, (low, high) = values.crossing(0, len(nodes)), layers[:2][-1]
    for v in carried:
        read = max((i for i, node in enumerate(nodes) if v in node.reads), default=0)
        crossing[: read + 1] += aval_bytes(program.avals[v])
    across = crossing[low or high]  # what a scan carries crosses the end of an iteration
    few, work = crossing <= (1 + SLACK) * across, np.array([flops(node) for node in nodes])
    ends = [low]
    for p in range(low + 1, high):
        narrow = few[p] and (not few[p - 1] or values.within[p - 1])
        if narrow and work[ends[-1] : p].any() and work[p:high].any():
            ends.append(p)
    ends = [low, *sorted(sorted(ends[1:], key=crossing.__getitem__)[: 2 * MOST_PARTS]), high]

    bytes_in = lambda part: values.inside(part.start, part.stop)
    kept = turns * len(layers) * across
    bytes_of = lambda parts: kept * (len(parts) - 1) + max(map(bytes_in, parts))

    def finer(parts: list[range]) -> list[range]:
        """Returns the parts with the largest of them divided, or the parts as they are."""
        at = max(range(len(parts)), key=lambda i: bytes_in(parts[i]))
        own = [end for end in ends if parts[at].start <= end <= parts[at].stop]
        with_own = lambda found: [*parts[:at], *found, *parts[at + 1 :]]
        best = min([parts, *map(with_own, _alike(nodes, own))], key=bytes_of)
        if best is not parts or len(own) - 2 <= ENDS:
            return best
        cuts = Cuts(values, work, own, turns)
        every = [with_own(cuts.best(s)[1]) for s in np.unique(cuts.inside[cuts.has_product])]
        least = min(map(bytes_of, every))
        best = min((found for found in every if bytes_of(found) <= NEARLY * least), key=len)
        return best if bytes_of(best) < GAIN * bytes_of(parts) else parts

    best = [range(low, high)]
    while (found := finer(best)) != best:
        best = found
    best = best if len(best) > 1 else []
    return [range(p.start + by, p.stop + by) for by in (s - low for s, _ in layers) for p in best]


def _alike(nodes: Sequence[Node], ends: Sequence[int]) -> Iterator[list[range]]:
    """Yields parts of a layer that have about equally many operations, and most primitives in
    common, those within loops and conditionals included.

    ends: the start of the layer, the ends at which it may be cut, and its end.
    """
    names = lambda node: [node.primitive, *(e.primitive.name for e in inside(node.eqn))]
    low, *within, high = ends
    for count in range(2, min(len(within) + 1, MOST_PARTS) + 1):
        equal = np.linspace(low, high, count + 1)[1:-1]
        cuts = [min(within, key=lambda end: abs(end - wanted)) for wanted in equal]
        parts = [range(*part) for part in itertools.pairwise([low, *cuts, high])]
        first, *others = (Counter(n for at in part for n in names(nodes[at])) for part in parts)
        if all((first & x).total() > ALIKE * (first | x).total() for x in others):
            yield parts


def cheap_pieces(program: Program, stretches: Sequence[range], largest: int) -> list[range]:
    """Returns pieces without matrix products, and without other operations that are expensive to
    repeat, whose recomputation frees more bytes than are inside a layer: distances of all pairs,
    for example. There are none without layers. The end of the program may be such a piece.

    stretches: the nodes that pieces may have. There is at most one piece between two expensive
      operations of a stretch.
    largest: the most bytes inside a layer; 0 without layers.
    """
    if not largest:
        return []
    nodes, values = program.nodes, Values(program, views_of(program, program.inputs))
    work = np.array([flops(node) for node in nodes])
    cheap = [w == 0 and node.primitive not in COSTLY for node, w in zip(nodes, work)]
    least = max(largest, SHARE * values.total())
    given, found = {*program.inputs}, []
    for stretch in stretches:
        for is_cheap, run in itertools.groupby(stretch, cheap.__getitem__):
            first, *_ = positions = [*run]
            if not is_cheap or values.inside(first, positions[-1] + 1) <= least:
                continue
            of_run = range(first, positions[-1] + 1)
            cuts = Cuts(values, work, cut_positions(values, work, of_run))
            freed = np.triu(cuts.inside - cuts.across, 1)
            low, high = cuts.positions[[*np.unravel_index(freed.argmax(), freed.shape)]].tolist()
            piece = part(program, low, high)
            computed = any(is_inexact(piece.avals[v]) for v in piece.inputs if v not in given)
            if computed and freed.max() > least and freed_bytes(piece) > least:
                found.append(range(low, high))
    return found


def runs(free: np.ndarray, taken: Sequence[range]) -> list[range]:
    """Returns the stretches of free nodes outside `taken`."""
    free = free.copy()
    for stretch in taken:
        free[stretch.start : stretch.stop] = False
    edges = np.flatnonzero(np.diff(np.concatenate([[0], free, [0]]))).tolist()
    return [*map(range, edges[::2], edges[1::2])]


def checkpoints(nodes: Sequence[Node], stretches: Sequence[range]) -> list[range]:
    """Returns the user's checkpoints that contain no part of a layer or of a piece. They are pieces
    too, because their author found that they hold much.

    stretches: the nodes outside layers and pieces.
    """
    inside: dict[range, list[int]] = {}
    for position in itertools.chain(*stretches):
        inside.setdefault(nodes[position].checkpoint, []).append(position)
    whole = (at for checkpoint, at in inside.items() if checkpoint and len(at) == len(checkpoint))
    return [range(at[0], at[-1] + 1) for at in whole]


def freed_bytes(piece: Program) -> int:
    """Returns the bytes that the derivative of a piece reads, less the bytes of its inputs, which
    are saved if the piece is recomputed. They are about equal for a softmax at the end of a loss.
    """
    avals = [piece.avals[v] for v in piece.inputs]

    def read_by_derivative(*arrays):
        # Inside a shard_map, the type of an array that differs from device to device says so.
        given = (varying(a, axes_of(aval)) for a, aval in zip(arrays, avals))
        return jax.vjp(lambda *given: piece.run(given), *given)[1]

    try:
        read = jax.eval_shape(read_by_derivative, *map(shape_of, avals))
    except NotImplementedError:  # an operation without a derivative, on values without a gradient
        return 0
    return sum(map(aval_bytes, jax.tree.leaves(read))) - sum(map(aval_bytes, avals))


def turns_of(node: Node) -> int:
    """Returns the number of iterations of a scan; 0 for any other node."""
    return node.eqn.params["length"] if node.primitive == "scan" else 0


def _bytes_within(node: Node) -> int:
    """Returns the bytes of the values inside all iterations of a scan, or inside the branches of a
    conditional; 0 for any other node.
    """
    params, turns = node.eqn.params, turns_of(node)
    inner = [as_closed(params["jaxpr"])] if turns else params.get("branches", ())
    bodies = [program_of(closed, lambda _: False) for closed in inner]
    return max(turns, 1) * sum(Values(body, ()).inside(0, len(body.nodes)) for body in bodies)


def part(program: Program, low: int, high: int) -> Program:
    """Returns nodes `low` to `high` as a program. Its inputs are the values that the nodes read,
    and its outputs are the values that later nodes read.
    """
    nodes = program.nodes[low:high]
    made = {v for node in nodes for v in node.outputs}
    reads = dict.fromkeys(v for node in nodes for v in node.reads if v not in made)
    later = {v for node in program.nodes[high:] for v in node.reads}
    later |= {v for v in program.outputs if isinstance(v, int)}
    outputs = tuple(v for node in nodes for v in node.outputs if v in later)
    inputs = tuple(v for v in reads if v not in program.constants)
    return dataclasses.replace(program, nodes=nodes, inputs=inputs, outputs=outputs)


def with_views(piece: Program, views: Sequence[Node]) -> Program:
    """Returns a piece that computes the casts and views that it reads."""
    made = {v for node in piece.nodes for v in node.outputs}
    more = (n for n in leading_to(views, piece.inputs) if made.isdisjoint(n.outputs))
    nodes = (*more, *piece.nodes)
    made = {v for node in nodes for v in node.outputs}
    reads = dict.fromkeys(v for node in nodes for v in node.reads if v not in made)
    inputs = tuple(v for v in reads if v not in piece.constants)
    of_views = {v for node in views for v in node.outputs}
    outputs = tuple(v for v in piece.outputs if v not in of_views)
    return dataclasses.replace(piece, nodes=nodes, inputs=inputs, outputs=outputs)


def activations_of(program: Program, piece: Program) -> list[int]:
    """Returns the values of a piece that the program computes before it. For the first piece these
    are what the first operand of its first product depends on: the other operand is a parameter.
    A batch that the loss reads from its closure is a constant.
    """
    inexact = [v for v in (*piece.inputs, *piece.constants) if is_inexact(piece.avals[v])]
    given = {*program.inputs, *program.constants}
    if computed := [v for v in inexact if v not in given]:
        return computed
    first = next((node for node in piece.nodes if flops(node)), piece.nodes[0]).reads[:1]
    reads = {v for node in leading_to(piece.nodes, first) for v in node.reads}.union(first)
    return [v for v in inexact if v in reads]
