"""Names the tensors that a user's derivative rule (`jax.custom_vjp`) saves, by one name.

Such a rule saves tensors from within its forward: an attention kernel saves its result and the sums
of its rows. A tag behind the rule is on a copy that the rule does not read, so keeping that tag
would not spare the kernel's second run. Here the rule's own tensors are named. A `jax.shard_map`
that calls such rules is treated as one rule: attention kernels run inside a `shard_map`, since XLA
does not divide them.

All tensors that a rule saves are decided as one. The alternative is a decision for each tensor. The
tensors come from within the rule's forward, and recomputing any of them costs the whole forward.
`jax.vjp` of the call shows which tensors are saved. They have one tag of kind `exact`, because a
codec's error in the logarithm of a softmax's sum would be an error of the exponent.

A rule that depends on which operands have a derivative (`symbolic_zeros`) is left unchanged: for
`jax.vjp`, all operands have a derivative.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem._model.layer.graph import RULE, aval_bytes, has_effects, shape_of
from jaxmem._model.tags.saved import saving, tagging
from jaxmem._trace.jaxpr import as_closed, equations
from jaxmem._trace.primitives import TAGS
from jaxmem._trace.rewrite import Node, Program, program_of, with_branches
from jaxmem._trace.vary import axes_of, mapped_axes, varying

# The results that a rule saves, and the shape of the largest tensor that it saves.
Saved = tuple[tuple[int, ...], jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class DerivativeRule:
    """A call with a derivative of its own, which saves more than its operands.

    node: the user's node.
    held: the results that the rule saves.
    saved: a number for all saved tensors together. The program has no value of this number.
    inside: the program of a `jax.shard_map` that calls rules; None if the node is the rule.
    """

    node: Node
    held: tuple[int, ...]
    saved: int
    inside: Program | None = None

    def __call__(self, *operands) -> Sequence:
        return self.node.bind(operands)

    def named(self, name: str) -> Callable[..., Sequence]:
        """Returns the call with a tag `name` on each saved tensor that is not an operand."""
        if self.inside is None:
            return tagging(lambda *operands: list(self.node.bind(operands)), name)
        made = with_branches(self.node, [functools.partial(_named_inside, self.inside, name)]).call
        assert made is not None
        return made


def _named_inside(program: Program, name: str, *operands) -> list:
    """Returns the results of a program inside a `jax.shard_map`, with a tag `name` on the tensors
    that its rules save. The rules are found while the `shard_map` is traced, since only then the
    mesh axes have a meaning.
    """
    called = lambda node: (
        node.call.named(name) if isinstance(node.call, DerivativeRule) else node.call
    )
    ruled = with_rules(program)
    nodes = tuple(dataclasses.replace(node, call=called(node)) for node in ruled.nodes)
    return dataclasses.replace(ruled, nodes=nodes).run(operands)


def with_rules(program: Program) -> Program:
    """Returns `program` with one more number for each rule that saves more than its operands. The
    number follows the rule's results, and `Program.run` gives it no value.
    """
    avals, nodes = list(program.avals), []
    for node in program.nodes:
        path, inside = node.path, None
        if _is_rule(node):
            found = _saved(node)
        else:
            inside, path, found = _of_mapped(node)
        if found is not None:
            held, largest = found
            avals.append(largest)
            rule = DerivativeRule(node, held, len(avals) - 1, inside)
            outputs = (*node.outputs, rule.saved)
            node = dataclasses.replace(node, primitive=RULE, outputs=outputs, path=path, call=rule)
        nodes.append(node)
    return dataclasses.replace(program, avals=tuple(avals), nodes=tuple(nodes))


def _is_rule(node: Node) -> bool:
    """Whether the node is a rule that may run through `jax.vjp`. A rule with `symbolic_zeros` may
    not: for `jax.vjp` all operands have a derivative.
    """
    if node.primitive != "custom_vjp_call" or has_effects(node):
        return False
    return not node.eqn.params.get("symbolic_zeros")


def _of_mapped(node: Node) -> tuple[Program | None, tuple[str, ...], Saved | None]:
    """Returns the program inside a `jax.shard_map` that calls rules, the path of the first rule,
    and the saved tensors; (None, the node's path, None) for any other node.
    """
    nothing = None, node.path, None
    if (axes := mapped_axes(node.eqn)) is None or has_effects(node):
        return nothing
    program = program_of(as_closed(node.eqn.params["jaxpr"]), lambda eqn: False)
    if not any(map(_is_rule, program.nodes)):
        return nothing
    rules: list[DerivativeRule] = []
    sizes: list[Any] = []

    def look(*operands):
        ruled = with_rules(program)
        for each in ruled.nodes:
            if isinstance(each.call, DerivativeRule):
                rules.append(each.call)
                sizes.append(ruled.avals[each.call.saved])
        return ruled.run(operands)

    call = with_branches(node, [look]).call
    assert call is not None
    jax.make_jaxpr(call)(*(shape_of(v.aval) for v in node.eqn.invars))
    if not rules:
        return nothing
    inside = {v for rule in rules for v in rule.held}
    held = tuple(v for v, inner in zip(node.outputs, program.outputs) if inner in inside)
    largest = max(sizes, key=aval_bytes)
    parts = math.prod(axes.values())  # each device has one part of the whole tensor
    whole = jax.ShapeDtypeStruct((parts, *largest.shape), largest.dtype)
    return program, (*node.path, *rules[0].node.path), (held, whole)


def _saved(node: Node) -> Saved | None:
    """Returns the results that a rule saves, and the largest saved tensor. Returns None if the rule
    saves only operands, or if its author has named the saved tensors.
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
        # Inside a shard_map, the type of an array that differs from device to device says so.
        return jax.vjp(function, *(varying(a, axes_of(t)) for a, t in zip(arrays, types)))[0]

    traced = jax.make_jaxpr(forward)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types))
    decided = any(eqn.primitive.name in TAGS for eqn in equations(traced.jaxpr))
    largest = max(sizes, key=aval_bytes, default=None)
    return None if decided or largest is None or not aval_bytes(largest) else (tuple(held), largest)
