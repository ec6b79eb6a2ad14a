"""Finds the layers of a program, wherever they are in it, and makes them blocks.

Layers are the iterations of a `jax.lax.scan`, or the layers of a Python loop: stretches of a
program that repeat, which are cut where the fewest bytes cross. What does not repeat is cut into
pieces (`pieces.py`), if it has enough of the FLOPs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._core.groups import AUTO, auto_label
from jaxmem._model.auto.pieces import (
    SHARE,
    Values,
    activations_of,
    cheap_pieces,
    checkpoints,
    divided,
    freed_bytes,
    part,
    pieces,
    runs,
    turns_of,
    with_views,
)
from jaxmem._model.auto.repeats import Ends, between, equal_stretches, kinds_of, repeats
from jaxmem._model.layer.block import Layer, layer_of, layers_of
from jaxmem._model.layer.graph import LayerGraph, flops, has_effects, is_inexact, through, views_of
from jaxmem._model.tags.named import is_block
from jaxmem._model.tags.policy import Policy, groups_of
from jaxmem._trace.jaxpr import ClosedJaxpr, as_closed, as_scan, inside, line_of
from jaxmem._trace.primitives import VIEWS
from jaxmem._trace.rewrite import Node, Program, branches, program_of, standing_for, with_branches
from jaxmem.errors import TagError

WITHIN = 0.6  # of an iteration's FLOPs: an inner loop with more FLOPs is the loop over layers
SHOWN = 3  # loops in an error


class Finder:
    """Makes blocks of layers, under the decisions of `plan`.

    plan: an object that makes decisions.
    first: number of labels that other functions of the step have taken.
    beside: the bytes inside a layer of a Python loop that the programs are beside; 0 if there is
      none.
    found: the layers, in order. Equal layers of one stretch have one label.
    """

    def __init__(self, plan, first: int = 0, beside: int = 0):
        self.plan, self.beside = plan, beside
        self.found: list[Layer] = []
        self.labels = first
        self._started: dict[int, int] = {}

    def with_blocks(self, program: Program, turns: int = 1) -> Program:
        """Returns `program` with its layers as blocks: the iterations of scans, the layers of
        Python loops, and pieces of what does not repeat; and the layers inside conditionals and
        `shard_map`s outside these.

        turns: the number of iterations of the loop that the program is an iteration of, or 1.
        """
        graph, views = LayerGraph(program, ()), views_of(program, program.inputs)
        found, loops = _layers(program, graph, self.beside, turns)
        equal = {low: layers for layers in found for low, _ in layers}
        nodes: list[Node] = []
        blocks: dict[int, tuple[int, list[Node]]] = {}
        position = 0
        while position < len(program.nodes):
            if position not in equal:
                nodes.append(self._loop(program.nodes[position], loops[position], graph))
                position += 1
                continue
            if position not in blocks:
                blocks |= self._unrolled(program, equal[position], views)
            position, block = blocks[position]
            nodes += block
        return dataclasses.replace(program, nodes=tuple(nodes))

    def _label(self) -> str:
        """Returns the block label of the next set of equal layers: `auto`, `auto_2`, ..."""
        self.labels += 1
        return auto_label(self.labels)

    def _loop(self, node: Node, of_layers: bool, graph: LayerGraph) -> Node:
        """Returns a scan over layers with each iteration as a block; a node that contains such
        scans, with blocks inside; and any other node unchanged.

        of_layers: whether the node is a scan over layers.
        """
        if is_block(node.eqn) or _holds_blocks(node):
            return node  # the user's own blocks are not changed
        if inner := branches(node):
            return with_branches(node, [lambda *x, c=c: self._run(c, x) for c in inner])
        if not of_layers:
            return node
        program, activations = turn(node, graph)
        turns = node.eqn.params["length"]
        if holds_layers_within(program):
            blocks = self.with_blocks(program, turns)
            return with_bodies(node, {range(turns): lambda *inputs: blocks.run(inputs)})
        if parts := divided(program, [(0, len(program.nodes))], activations, turns):
            return with_bodies(node, *self._of_parts(program, parts, activations, turns))
        found = layer_of(program, activations, self._label())
        layer = dataclasses.replace(found, line=line_of(node.eqn), turns=turns)
        self.found.append(layer)
        groups = groups_of(self.plan, layer.label, turns, layer.label)
        return with_bodies(node, layer.blocks(groups, prevent_cse=False), _spans_of(groups))

    def _unrolled(
        self, program: Program, layers: Ends, views: list[Node]
    ) -> dict[int, tuple[int, list[Node]]]:
        """Makes blocks of equal layers, which share decisions. Returns for the first node of each
        the end of the layer, and the nodes that replace it.

        Layers that follow each other may be in spans: each span is under a checkpoint, and its end
        and its node are returned for the first node of the span's first layer.

        views: the casts and views of the program's inputs.
        """
        apart = any(end != start for (_, end), (start, _) in itertools.pairwise(layers))
        are_pieces = apart or len(layers) == 1
        views = views if are_pieces else []
        parts = [with_views(part(program, low, high), views) for low, high in layers]
        of_pieces = (activations_of(program, piece) for piece in parts)
        activations = [*of_pieces] if are_pieces else between(program, layers)
        alike = self._alike(program, layers, parts, activations)
        label = alike[0].label
        groups = groups_of(self.plan, label, len(layers), "" if are_pieces else label)
        found = {}
        for number, ((low, high), layer) in enumerate(zip(layers, alike)):
            block = layer.block_of(number, groups)
            found[low] = high, _replaced(program, range(low, high), views, layer, block)
        for group, policy in groups.items():
            for first in group[: len(group) - len(group) % policy.span : policy.span]:
                of_span = layers[first : first + policy.span]
                if len(of_span) > 1:
                    blocks = [node for low, _ in of_span for node in found[low][1]]
                    low, high = of_span[0][0], of_span[-1][1]
                    found[low] = high, [_span(part(program, low, high), blocks)]
        return found

    def _of_parts(
        self, program: Program, parts: Sequence[range], carried: Sequence[int], turns: int
    ) -> tuple[dict[range, Callable[..., list]], dict[range, int]]:
        """Makes blocks of the layers of a scan's iteration, if it has several. Returns the bodies
        of the scan: one for each range of iterations in which no layer's decisions change; and the
        number of iterations of a span, for each range.

        program: one of `turns` iterations, which the parts cover. The scan carries the activations
          `carried`.
        """
        views = views_of(program, {*program.inputs}.difference(carried))
        given = {*program.inputs, *program.constants}.difference(carried)
        activation = lambda v: v not in given and is_inexact(program.avals[v])
        found, loop = {}, auto_label(self.labels + 1)
        for layers in equal_stretches(program, kinds_of(program), parts):
            own = [with_views(part(program, low, high), views) for low, high in layers]
            activations = [[*filter(activation, piece.inputs)] for piece in own]
            alike = self._alike(program, layers, own, activations, turns)
            groups = groups_of(self.plan, alike[0].label, turns, loop)
            found |= {ends: (layer, groups) for ends, layer in zip(layers, alike)}
        starts = sorted({group.start for _, groups in found.values() for group in groups})
        spans = _spans_of(*(groups for _, groups in found.values()))

        def body(number: int) -> Callable[..., list]:
            nodes = []
            for ends, (layer, groups) in sorted(found.items(), key=lambda item: item[0]):
                # The block is under a barrier, so that the backward recomputes one layer at a time.
                block = layer.block_of(number, groups)
                nodes += _replaced(program, range(*ends), views, layer, block)
            return lambda *inputs: dataclasses.replace(program, nodes=(*nodes,)).run(inputs)

        return {range(*e): body(e[0]) for e in itertools.pairwise([*starts, turns])}, spans

    def _alike(
        self,
        program: Program,
        layers: Ends,
        parts: Sequence[Program],
        activations: Sequence[Sequence[int]],
        turns: int = 1,
    ) -> list[Layer]:
        """Returns equal layers of a program under a new label.

        parts, activations: each layer as a program, and the activations of each layer.
        turns: the number of iterations of the loop that the program is an iteration of, or 1.
        """
        alike = layers_of(parts, activations, self._label())
        lines = [line_of(program.nodes[low].eqn) for low, _ in layers]
        found = [dataclasses.replace(x, line=line, turns=turns) for x, line in zip(alike, lines)]
        self.found += found
        return found

    def _run(self, closed, operands) -> list:
        """Runs an inner program with its layers as blocks. The program is read while it is traced,
        since only then its mesh axes have a meaning. If JAX traces it again, its layers get the
        labels of the first trace.
        """
        highest = self.labels
        self.labels = self._started.setdefault(id(closed), highest)
        results = self.with_blocks(read(closed)).run(operands)
        self.labels = max(highest, self.labels)
        return results


def _replaced(
    program: Program,
    nodes: range,
    views: Sequence[Node],
    layer: Layer,
    block: Callable[..., list],
) -> list[Node]:
    """Returns the nodes that replace some nodes of a program: the casts and views among them, and
    the layer as one node, which runs `block`.
    """
    of_views = {v for node in views for v in node.outputs}
    replaced = program.nodes[nodes.start : nodes.stop]
    kept = [n for n in replaced if not of_views.isdisjoint(n.outputs)]
    return [*kept, _segment(replaced[-1], layer.program, block)]


def _spans_of(*blocks: Mapping[range, Policy]) -> dict[range, int]:
    """Returns the number of iterations of a span, for each group of a loop's iterations.

    blocks: the groups of each block of an iteration.

    Raises TagError if some blocks are in other spans than the others.
    """
    several = [{group: policy.span for group, policy in groups.items()} for groups in blocks]
    differ = any(found != several[0] for found in several)
    if differ and any(span > 1 for found in several for span in found.values()):
        labels = dict.fromkeys(policy.block for groups in blocks for policy in groups.values())
        raise TagError(
            f"auto: `plan` decides {', '.join(labels)}, which take turns in one loop, and a span"
            " has whole iterations; expected equal groups and spans for all blocks of the loop,"
            " such as auto[0:8:2] and auto_2[0:8:2]"
        )
    return several[0]


def _segment(last: Node, program: Program, call: Callable) -> Node:
    """Returns one node that runs `call` in place of the nodes of a layer or of a span.

    last: the last node of the layer or span.
    program: the layer or span as a program.
    call: the layer or span as a function of its inputs.
    """
    outputs = tuple(v for v in program.outputs if isinstance(v, int))
    return standing_for(last, AUTO, program.inputs, outputs, call)


def _span(program: Program, blocks: Sequence[Node]) -> Node:
    """Returns one node that runs the layers of a span under a checkpoint, which saves the span's
    inputs alone.

    program: the layers of the span.
    blocks: a node for each layer.
    """
    of_blocks = dataclasses.replace(program, nodes=tuple(blocks))
    run = jax.checkpoint(lambda *inputs: of_blocks.run(inputs))
    return _segment(program.nodes[-1], program, run)


def read(closed: ClosedJaxpr) -> Program:
    """Returns a trace as a program. Blocks that a plan already decides are single nodes."""
    return program_of(closed, is_block)


def _holds_blocks(node: Node) -> bool:
    """Whether an operation contains a block under a jaxmem policy."""
    return any(map(is_block, inside(node.eqn)))


def _layers(
    program: Program, graph: LayerGraph, beside: int, turns: int
) -> tuple[list[Ends], np.ndarray]:
    """Returns the ends of the layers of Python loops and of the pieces of a program, and whether
    each node is a scan over layers. Equal layers, and equal pieces, are in one list. There are none
    if scans have nearly all FLOPs. Layers in turns that repeat together are single.

    A scan without matrix products outside of layers, such as the steps of a simulation in time, is
    a scan over layers if it has activations and a derivative, and its iterations hold more bytes
    than a layer.

    beside: as for `Finder`.
    turns: as for `pieces`.
    """
    nodes = program.nodes
    work = np.array([flops(node) for node in nodes])
    loops = np.array([*map(is_loop, nodes)], bool)
    of_scans = work[~loops].sum() < SHARE * work.sum()
    kinds = kinds_of(program, np.flatnonzero(loops).tolist())  # a scan is in no layer
    stretches = [] if of_scans else repeats(program, kinds=kinds)
    found = [[(low, low + s.step) for low in s] for s in stretches]
    if loops.any() and sum(work[a:b].sum() for s in found for a, b in s) < SHARE * work.sum():
        found = []
    # A node is in no piece if it is a block of the user, or holds blocks or a `jax.Ref`.
    stays = lambda node: bool(branches(node)) or _holds_blocks(node) or has_effects(node)
    free = ~loops & ~np.array([*map(stays, nodes)], bool)
    in_turns = [divided(program, layers) for layers in found]
    found = [layers for layers, parts in zip(found, in_turns) if not parts]
    parts = [*itertools.chain(*in_turns)]
    layers = [*(range(*ends) for ends in itertools.chain(*found)), *parts]
    values = Values(program, ())
    repeated = max((values.inside(s.start, s.stop) for s in layers), default=beside)
    of_loops = (values.within[at] // turns_of(nodes[at]) for at in np.flatnonzero(loops))
    largest = max(repeated, *of_loops, 0)
    least = max(largest, SHARE * values.total())
    for at in itertools.chain(*runs(free, layers)):
        if turns_of(nodes[at]) > 1 and values.within[at] > least and turn(nodes[at], graph)[1]:
            loops[at] = freed_bytes(part(program, at, at + 1)) > 0
    free &= ~loops
    cheap = cheap_pieces(program, runs(free, layers), largest)
    beside_cheap = [] if of_scans else runs(free, [*layers, *cheap])
    of_pieces = [*pieces(program, beside_cheap, repeated, turns), *cheap]
    of_pieces += checkpoints(nodes, runs(free, [*layers, *of_pieces]))
    return [*found, *equal_stretches(program, kinds, [*parts, *of_pieces])], loops


def is_loop(node: Node) -> bool:
    """Whether the node is a scan of at least two iterations that multiply matrices, and neither
    reads nor writes a `jax.Ref`.
    """
    return turns_of(node) > 1 and flops(node) > 0 and not has_effects(node)


def turn(node: Node, graph: LayerGraph) -> tuple[Program, list[int]]:
    """Returns one iteration of a scan as a program, and its activations: the floating-point arrays
    that the scan carries. If it carries none, the activations are its slices of computed values,
    such as the chunks of a loss.

    graph: the program that contains the scan.
    """
    scan = as_scan(node.eqn)
    assert scan is not None
    program = read(as_closed(node.eqn.params["jaxpr"]))
    first = scan.consts + scan.carry
    floating = lambda v: is_inexact(program.avals[v]) and program.avals[v].ndim > 0
    carried = [v for v in program.inputs[scan.consts : first] if floating(v)]
    if carried:
        return program, carried
    is_view = lambda made: made.primitive in VIEWS
    sliced = zip(program.inputs[first:], (through(graph, v, is_view) for v in node.inputs[first:]))
    return program, [v for v, (source, _) in sliced if floating(v) and source in graph.maker]


def holds_layers_within(program: Program) -> bool:
    """Whether most FLOPs of an iteration are an inner loop over layers: the iteration is then a
    microbatch, for example.
    """
    total = sum(map(flops, program.nodes))
    return any(is_loop(n) and _slices(n) and flops(n) > WITHIN * total for n in program.nodes)


def _slices(node: Node) -> bool:
    """Whether a scan reads a slice of an array in each iteration, as layers read parameters."""
    scan = as_scan(node.eqn)
    assert scan is not None
    return scan.consts + scan.carry < len(node.inputs)


def with_bodies(
    node: Node, bodies: Mapping[range, Callable], spans: Mapping[range, int] = MappingProxyType({})
) -> Node:
    """Returns the scan with other bodies, which are functions from the inputs of an iteration to
    its outputs.

    bodies: the body of each range of iterations, in the order in which they run. Each body runs in
      a scan of its own, and the sliced arrays are divided among the scans.
    spans: the number of iterations of a span, for each range. In spans of more than one iteration,
      the outer scan runs over spans, and the inner scan runs over the iterations of a span. Each
      inner scan is under a checkpoint. The iterations after the last whole span run in a scan
      without spans.
    """
    scan = as_scan(node.eqn)
    assert scan is not None
    consts, carry, params = scan.consts, scan.carry, node.eqn.params
    turns, backward = params["length"], params["reverse"]

    pieces = []
    for group, step in bodies.items():
        span = spans.get(group, 1)
        whole = group.stop - len(group) % span
        parts = (range(group.start, whole), span), (range(whole, group.stop), 1)
        pieces += [(part, step, of_part) for part, of_part in parts if part]

    def slices(array, group: range):
        if len(group) == turns:
            return array
        first = turns - group.stop if backward else group.start
        # Remove with JAX 0.10: there a slice without strides, as indexing is, adds no gradient to a
        # `jax.Ref`.
        return jax.lax.slice_in_dim(array, first, first + len(group))

    def call(*operands):
        carried, sliced = operands[consts : consts + carry], operands[consts + carry :]
        results = []
        for group, step, span in pieces:
            run = functools.partial(jax.lax.scan, reverse=backward, unroll=params["unroll"])
            run = run if span == 1 else functools.partial(_in_spans, run, span)
            body = _body(step, operands[:consts], carry)
            xs = tuple(slices(x, group) for x in sliced)
            carried, stacked = run(body, tuple(carried), xs, length=len(group))
            results.append(stacked)
        if len(results) == 1:
            return (*carried, *results[0])
        in_place = results[::-1] if backward else results
        return (*carried, *(jnp.concatenate(each) for each in zip(*in_place)))

    return dataclasses.replace(node, call=call)


def _in_spans(scan: Callable, span: int, body: Callable, carry, xs: tuple, length: int):
    """Runs `scan(body, carry, xs, length=length)` in spans of `span` iterations, whose inputs alone
    are saved for the backward.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_span(carry, xs):
        return scan(body, carry, xs, length=span)

    spans = length // span
    by_span = jax.tree.map(lambda a: a.reshape(spans, span, *a.shape[1:]), xs)
    carry, ys = scan(of_span, carry, by_span, length=spans, unroll=1)
    return carry, jax.tree.map(lambda a: a.reshape(length, *a.shape[2:]), ys)


def _body(step: Callable, whole: Sequence, carry: int) -> Callable:
    """Returns a scan's body that calls `step(*whole, *carried, *sliced)`. `whole` are the arrays
    that every iteration reads, and `carry` is the number of carried arrays.
    """

    def body(carried, sliced):
        results = step(*whole, *carried, *sliced)
        return tuple(results[:carry]), tuple(results[carry:])

    return body


def loops_named(program: Program, why: Callable[[Node], str]) -> str:
    """The largest loops of a program, by FLOPs and then by the number of values that they make, in
    words for an error.

    why: returns the reason why a loop is not a loop over layers.
    """
    loops = [n for n in program.nodes if n.primitive in ("scan", "while")]
    size = lambda n: (flops(n), sum(v.aval.size for v in n.eqn.outvars if hasattr(v.aval, "size")))
    largest = sorted(loops, key=size, reverse=True)[:SHOWN]
    named = "; ".join(f"the {n.primitive} at {line_of(n.eqn)}: {why(n)}" for n in largest)
    return named or "it has no loop"
