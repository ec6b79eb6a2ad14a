"""Finds the layers of a program, wherever they are in it, and makes them blocks."""

import dataclasses
from collections.abc import Callable

from jaxmem._core.groups import AUTO, auto_label
from jaxmem._model.auto.loops import holds_layers_within, is_loop, turn, with_bodies
from jaxmem._model.auto.repeats import Repeat, between, part, repeats
from jaxmem._model.layer.block import Layer, layer_of, layers_of
from jaxmem._model.layer.graph import LayerGraph
from jaxmem._model.tags.groups import groups_of
from jaxmem._model.tags.named import is_block
from jaxmem._trace.jaxpr import ClosedJaxpr, inside, place_of
from jaxmem._trace.rewrite import Node, Program, branches, program_of, standing_for, with_branches


class Finder:
    """Makes blocks of layers, decided by `plan`.

    plan: an object that makes decisions.
    first: how many labels are taken already, by other functions of the same step.
    found: the layers, in order; those of one stretch of equal layers have one label.
    """

    def __init__(self, plan, first: int = 0):
        self.plan = plan
        self.found: list[Layer] = []
        self.labels = first
        self._started: dict[int, int] = {}

    def with_blocks(self, program: Program) -> Program:
        """`program` with its layers as blocks: scans over layers, else the layers of Python loops,
        else what is inside conditionals and calls that stay whole.
        """
        before = self.labels
        graph = LayerGraph(program, ())
        nodes = [self._loop(node, graph) for node in program.nodes]
        if self.labels == before and (stretches := repeats(program)):
            return self._unrolled(program, stretches)
        return dataclasses.replace(program, nodes=tuple(nodes))

    def _label(self) -> str:
        self.labels += 1
        return auto_label(self.labels)

    def _loop(self, node: Node, graph: LayerGraph) -> Node:
        """A scan over layers with each turn a block, what holds such scans with them as blocks, and
        any other node as it is.
        """
        if is_block(node.eqn) or _holds_blocks(node):
            return node  # the user's own blocks are taken as they are
        if inner := branches(node):
            return with_branches(node, [lambda *x, c=c: self._run(c, x) for c in inner])
        if not is_loop(node):
            return node
        program, activations = turn(node, read, graph)
        if holds_layers_within(program):
            blocks = self.with_blocks(program)
            turns = node.eqn.params["length"]
            return with_bodies(node, [(0, turns, lambda *inputs: blocks.run(inputs))])
        found = layer_of(program, activations, self._label())
        turns = node.eqn.params["length"]
        layer = dataclasses.replace(found, place=place_of(node.eqn), turns=turns)
        self.found.append(layer)
        groups = groups_of(self.plan, layer.label, turns)
        blocks = zip(groups, layer.blocks(groups, prevent_cse=False))
        return with_bodies(node, [(g.start, g.stop, block) for g, block in blocks])

    def _unrolled(self, program: Program, stretches: list[Repeat]) -> Program:
        """The layers of Python loops as blocks: those of one stretch share their decisions."""
        nodes: list[Node] = []
        done = 0
        for stretch in stretches:
            nodes += program.nodes[done : stretch.start]
            label, layers = self._label(), list(stretch.layers())
            parts = [part(program, low, high) for low, high in layers]
            alike = layers_of(parts, between(program, layers), label)
            places = [place_of(program.nodes[low].eqn) for low, _ in layers]
            self.found += [
                dataclasses.replace(layer, place=place) for layer, place in zip(alike, places)
            ]
            ends = [program.nodes[high - 1] for _, high in layers]
            groups = groups_of(self.plan, label, len(layers))
            group_of = [i for i, g in enumerate(groups) for _ in range(g.start, g.stop)]
            for end, layer, i in zip(ends, alike, group_of):
                nodes.append(_segment(end, layer, layer.blocks(groups, prevent_cse=True)[i]))
            done = layers[-1][1]
        return dataclasses.replace(program, nodes=(*nodes, *program.nodes[done:]))

    def _run(self, closed, operands) -> list:
        """A program inside another, with its layers as blocks. It is read while it is traced, since
        only then its mesh axes have a meaning. JAX may trace it again: the layers' labels are then
        those of the first time.
        """
        highest = self.labels
        self.labels = self._started.setdefault(id(closed), highest)
        results = self.with_blocks(read(closed)).run(operands)
        self.labels = max(highest, self.labels)
        return results


def _segment(last: Node, layer: Layer, block: Callable) -> Node:
    """One node that runs `block` in the place of a layer's nodes.

    last: the last node of the layer.
    block: the layer as a function of its inputs.
    """
    program = layer.program
    outputs = tuple(v for v in program.outputs if isinstance(v, int))
    return standing_for(last, AUTO, program.inputs, outputs, block)


def read(closed: ClosedJaxpr) -> Program:
    """A trace as a program, in which the blocks that a plan decides already stay whole."""
    return program_of(closed, is_block)


def _holds_blocks(node: Node) -> bool:
    return any(map(is_block, inside(node.eqn)))
