"""What a derivative rule of the user's (`jax.custom_vjp`) saves, under one name.

Such a rule saves tensors from within its forward: an attention kernel its result and the sums of
its rows. A tag behind it is on a copy that the rule does not read, so that keeping the tag would
not spare the kernel's second run. Here the rule's own tensors are named.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem._jax.primitives import TAGS
from jaxmem._jax.rewrite import Node, Program, equations
from jaxmem._jax.vary import axes_of, varying
from jaxmem._layer.graph import RULE, aval_bytes, uses_references
from jaxmem._tags.saved import saving, tagging


@dataclasses.dataclass(frozen=True)
class Rule:
    """A call with a derivative of its own, which saves more than its operands.

    node: the user's.
    held: the results that it saves.
    saved: the number that stands for all that it saves, of which the program makes no value.
    """

    node: Node
    held: tuple[int, ...]
    saved: int

    def __call__(self, *operands) -> Sequence:
        return self.node.bind(operands)

    def named(self, name: str) -> Callable[..., Sequence]:
        """The call, with `name` for each tensor that it saves and that is none of its operands."""
        return tagging(lambda *operands: list(self.node.bind(operands)), name)


def with_rules(program: Program) -> Program:
    """`program` with one number more for each rule that saves more than its operands. It stands
    behind the rule's results, and `Program.run` gives it no value.
    """
    avals, nodes = list(program.avals), []
    for node in program.nodes:
        if _is_rule(node) and (found := _saved(node)):
            held, largest = found
            avals.append(largest)
            rule = Rule(node, held, len(avals) - 1)
            node = dataclasses.replace(
                node, primitive=RULE, outputs=(*node.outputs, rule.saved), call=rule
            )
        nodes.append(node)
    return dataclasses.replace(program, avals=tuple(avals), nodes=tuple(nodes))


def _is_rule(node: Node) -> bool:
    """Whether it is a rule that may be run through `jax.vjp`: one that asks which of its operands
    have a derivative (`symbolic_zeros`) would be told that all have.
    """
    if node.primitive != "custom_vjp_call" or uses_references(node):
        return False
    return not node.eqn.params.get("symbolic_zeros")


def _saved(node: Node) -> tuple[tuple[int, ...], jax.ShapeDtypeStruct] | None:
    """Which results a rule saves, and the largest that it saves; None where these are operands
    alone, or where its author has named them.
    """
    held: list[int] = []
    sizes: list[jax.ShapeDtypeStruct] = []

    def hold(operands, results, leaves):
        given, made = {id(x) for x in operands}, {id(x) for x in leaves}
        held.extend(v for v, x in zip(node.outputs, results) if id(x) in made - given)
        sizes.extend(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves if id(x) not in given)
        return results, list, leaves

    types: list[Any] = [v.aval for v in node.eqn.invars]
    function = saving(lambda *operands: list(node.bind(operands)), hold)

    def forward(*arrays):
        # Inside a shard_map, what differs from device to device has a type of its own.
        return jax.vjp(function, *(varying(a, axes_of(t)) for a, t in zip(arrays, types)))[0]

    traced = jax.make_jaxpr(forward)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types))
    decided = any(eqn.primitive.name in TAGS for eqn in equations(traced.jaxpr))
    largest = max(sizes, key=aval_bytes, default=None)
    return None if decided or largest is None or not aval_bytes(largest) else (tuple(held), largest)
