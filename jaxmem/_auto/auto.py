"""`jaxmem.auto`: a loss whose layers become blocks, and their tensors tags, as they are found."""

import dataclasses
import functools
from collections.abc import Callable

from jaxmem._auto.block import Layer, layer_of
from jaxmem._auto.calls import traced
from jaxmem._auto.loops import holds_layers_within, is_loop, turn, with_body
from jaxmem._auto.repeats import Repeat, between, part, repeats
from jaxmem._jax.jaxpr import subjaxprs
from jaxmem._jax.primitives import REMAT
from jaxmem._jax.rewrite import Node, Program, equations, program_of, standing_for
from jaxmem._tags.policy import Policy, decisions

LABEL = "auto"


def auto(function: Callable, plan=None) -> Callable:
    """`function` with its layers found and decided by `plan`, to be differentiated in its place.

    `jax.value_and_grad(jaxmem.auto(loss, plan))` needs no tag and no `jax.checkpoint` in the model:
    the loss is traced, its layers are found (each turn of a scan over layers, and the layers of a
    Python loop), and what is worth deciding in them is tagged. A `jax.checkpoint` of the user's own
    is taken away where it carries no jaxmem policy, since the plan decides in its place.

    function: a loss, of any arguments, results and Flax NNX modules.
    plan: a `jaxmem.Plan` or `jaxmem.plans.Assignment`; None returns `function` as it is.

    Raises StepError, when it is called, if no layer is found; TagError if `plan` is no plan.
    """
    decided = decisions(plan)
    if plan is None:
        return function

    @functools.wraps(function)
    def rewritten(*args, **kwargs):
        call = traced(function, args, kwargs)
        program, _ = with_blocks(_read(call.closed), decided, _Labels())
        return call.returned(program.run(call.arrays))

    return rewritten


@dataclasses.dataclass
class _Labels:
    """Names for the layers that are found, in order: "auto", "auto_2" and so on."""

    layers: list[Layer] = dataclasses.field(default_factory=list)
    count: int = 0

    def next(self) -> str:
        self.count += 1
        return LABEL if self.count == 1 else f"{LABEL}_{self.count}"


def with_blocks(program: Program, plan, labels: _Labels) -> tuple[Program, bool]:
    """`program` with its layers as blocks, and whether there are any."""
    nodes = [_loop(node, plan, labels) for node in program.nodes]
    if any(new is not old for new, old in zip(nodes, program.nodes)):
        return dataclasses.replace(program, nodes=tuple(nodes)), True
    stretches = repeats(program)
    return _unrolled(program, stretches, plan, labels), bool(stretches)


def _loop(node: Node, plan, labels: _Labels) -> Node:
    """A scan over layers with each turn a block; any other node as it is."""
    if not is_loop(node) or _planned(node):
        return node
    program, activations = turn(node, _read)
    if holds_layers_within(program):
        inner, _ = with_blocks(program, plan, labels)
        return with_body(node, lambda *inputs: inner.run(inputs))
    layer = layer_of(program, activations, labels.next())
    labels.layers.append(layer)
    return with_body(node, layer.block(plan, prevent_cse=False))


def _unrolled(program: Program, stretches: list[Repeat], plan, labels: _Labels) -> Program:
    """The layers of Python loops as blocks: those of one stretch share their decisions."""
    nodes: list[Node] = []
    done = 0
    for stretch in stretches:
        nodes += program.nodes[done : stretch.start]
        label, layers = labels.next(), list(stretch.layers())
        for (low, high), activations in zip(layers, between(program, layers)):
            layer = layer_of(part(program, low, high), activations, label)
            labels.layers.append(layer)
            nodes.append(_segment(program.nodes[high - 1], layer, plan))
            done = high
    return dataclasses.replace(program, nodes=(*nodes, *program.nodes[done:]))


def _segment(last: Node, layer: Layer, plan) -> Node:
    """One node that runs a layer in the place of its nodes, of which `last` is the last."""
    program = layer.program
    block = layer.block(plan, prevent_cse=True)
    outputs = tuple(v for v in program.outputs if isinstance(v, int))
    return standing_for(last, LABEL, program.inputs, outputs, block)


def _read(closed) -> Program:
    return program_of(closed, _is_block)


def _is_block(eqn) -> bool:
    """Whether an equation is a checkpoint that carries a plan's decisions already."""
    return eqn.primitive.name in REMAT and isinstance(eqn.params.get("policy"), Policy)


def _planned(node: Node) -> bool:
    return any(_is_block(eqn) for inner in subjaxprs(node.eqn) for eqn in equations(inner))
