"""Loops over layers: each turn of such a `jax.lax.scan` becomes a block."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxmem._model.layer.graph import LayerGraph, flops, is_inexact, through, uses_references
from jaxmem._trace.jaxpr import ClosedJaxpr, as_closed, as_scan
from jaxmem._trace.primitives import VIEWS
from jaxmem._trace.rewrite import Node, Program

SHARE = 0.6  # of a turn's FLOPs: what an inner loop holds more of is where the layers are


def is_loop(node: Node) -> bool:
    """Whether the node is a scan of at least two turns whose body multiplies matrices,
    and neither reads nor writes a `jax.Ref`.
    """
    turns = node.eqn.params["length"] if node.primitive == "scan" else 0
    return turns > 1 and flops(node) > 0 and not uses_references(node)


def turn(
    node: Node, read: Callable[[ClosedJaxpr], Program], graph: LayerGraph
) -> tuple[Program, list[int]]:
    """One turn of a scan as a program, and its activations: the floating arrays that it carries, or
    where it carries none, the slices of what was computed before: chunks of a loss, say.

    read: makes a program of a trace.
    graph: the program that the scan is in.
    """
    scan = as_scan(node.eqn)
    assert scan is not None
    program = read(as_closed(node.eqn.params["jaxpr"]))
    first = scan.consts + scan.carry
    floating = lambda v: is_inexact(program.avals[v]) and program.avals[v].ndim > 0
    carried = [v for v in program.inputs[scan.consts : first] if floating(v)]
    if carried:
        return program, carried
    sliced = zip(program.inputs[first:], node.inputs[first:])
    return program, [v for v, whole in sliced if floating(v) and _computed(graph, whole)]


def _computed(graph: LayerGraph, value) -> bool:
    """Whether an operation made the value, and did not only view an input."""
    source, _ = through(graph, value, lambda made: made.primitive in VIEWS)
    return source in graph.maker


def holds_layers_within(program: Program) -> bool:
    """Whether most of a turn is another loop over layers: the turn is a microbatch, say."""
    total = sum(map(flops, program.nodes))
    return any(is_loop(n) and _slices(n) and flops(n) > SHARE * total for n in program.nodes)


def _slices(node: Node) -> bool:
    """Whether a scan reads something a slice a turn, as layers read their parameters."""
    scan = as_scan(node.eqn)
    assert scan is not None
    return scan.consts + scan.carry < len(node.inputs)


def with_bodies(node: Node, bodies: Sequence[tuple[int, int, Callable]]) -> Node:
    """The scan with other bodies, from a turn's inputs to its outputs.

    bodies: (start, stop, body) for turns `start` up to `stop`, in the order in which they run. If
      there are several, a scan runs each, and what is sliced is divided among them.
    """
    scan = as_scan(node.eqn)
    assert scan is not None
    consts, carry, params = scan.consts, scan.carry, node.eqn.params
    turns, backward = params["length"], params["reverse"]

    def part(array, start: int, stop: int):
        if stop - start == turns:
            return array
        return array[turns - stop : turns - start] if backward else array[start:stop]

    def call(*operands):
        carried, sliced = operands[consts : consts + carry], operands[consts + carry :]
        pieces = []
        for start, stop, step in bodies:
            carried, stacked = jax.lax.scan(
                _body(step, operands[:consts], carry),
                tuple(carried),
                tuple(part(x, start, stop) for x in sliced),
                length=stop - start,
                reverse=backward,
                unroll=params["unroll"],
            )
            pieces.append(stacked)
        if len(pieces) == 1:
            return (*carried, *pieces[0])
        in_place = pieces[::-1] if backward else pieces
        return (*carried, *(jnp.concatenate(each) for each in zip(*in_place)))

    return dataclasses.replace(node, call=call)


def _body(step: Callable, whole: Sequence, carry: int) -> Callable:
    """A scan's body of `step`, which takes what is read whole, what is carried, and the slices."""

    def body(carried, sliced):
        results = step(*whole, *carried, *sliced)
        return tuple(results[:carry]), tuple(results[carry:])

    return body
