"""A layer's program as a block: tagged, under `jax.checkpoint` with the plan's policy."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxmem._model.codecs.registry import EXACT
from jaxmem._model.layer.candidates import MOST, Candidate, candidates
from jaxmem._model.layer.graph import LayerGraph, is_complex, is_costly, is_inexact
from jaxmem._model.layer.names import named
from jaxmem._model.layer.rules import DerivativeRule, with_rules
from jaxmem._model.layer.softmax import Softmax, with_softmaxes
from jaxmem._model.tags.groups import GroupPolicy
from jaxmem._model.tags.operations import (
    exp_tangent,
    sigmoid_tangent,
    softmax_tangent,
    tagged_within,
    tanh_tangent,
)
from jaxmem._model.tags.tag import name_p, tag, tag_p
from jaxmem._trace.rewrite import Node, Program, flatten
from jaxmem._trace.vary import axes_of, varying

_NUMBER = "value "  # begins a tag's name where every value is tagged by its number
_READS_ITSELF = {"tanh": tanh_tangent, "logistic": sigmoid_tangent, "exp": exp_tangent}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer found in a function.

    label: what it is called in a plan.
    program: what it computes, with each softmax, and each derivative rule, as one node.
    candidates: its values that get a tag.
    plain: what it computes, as the user wrote it, but for checkpoints.
    place: the user's file and line of its loop, or of its first operation.
    turns: how often its loop runs it.
    """

    label: str
    program: Program
    candidates: tuple[Candidate, ...]
    plain: Program
    place: str = ""
    turns: int = 1

    def blocks(self, groups: Sequence[GroupPolicy], prevent_cse: bool) -> list[Callable[..., list]]:
        """The layer as a function of its inputs, for each group of layers. A plan that keeps all of
        every layer makes no block: the layer is what it is without any checkpoint.
        """
        if len(groups) == 1 and groups[0].policy.choices is None:
            return [lambda *arguments: self.plain.run(arguments)]
        return [self.block(group.policy, prevent_cse) for group in groups]

    def block(self, policy: Any, prevent_cse: bool) -> Callable[..., list]:
        """The layer as a function of its inputs, under a policy of `_tags`."""
        tagged = _tagged(self.program, self.candidates)
        if policy.choices is None and any(map(is_complex, self.program.avals)):
            return tagged  # `jax.checkpoint` cannot save complex values, and would save all of them
        return jax.checkpoint(tagged, policy=policy, prevent_cse=prevent_cse)


def layer_of(program: Program, activations: Sequence[int], label: str) -> Layer:
    """`program` with its softmaxes folded, what its rules save numbered, and the candidates that
    its derivative depends on.
    """
    graph = LayerGraph(_folded(program), activations)
    found = _worth_it(graph, candidates(graph))
    # The largest are kept where there are too many, in the order in which they are made.
    largest = sorted(found, key=lambda c: -graph.bytes(c.value))[:MOST]
    kept = [c for c in found if c in largest]
    return Layer(label, graph.program, tuple(named(graph, kept)), program)


def layers_of(
    programs: Sequence[Program], activations: Sequence[Sequence[int]], label: str
) -> list[Layer]:
    """Equal layers, with the same candidates under the same names.

    They are found in the second layer, which takes what it reads from a layer like itself, and are
    at the same places in the others.
    """
    model = layer_of(programs[1], activations[1], label)
    own = lambda i: layer_of(programs[i], activations[i], label)
    return [_like(model, program) or own(i) for i, program in enumerate(programs)]


def _like(model: Layer, program: Program) -> Layer | None:
    """A layer with the candidates of `model`; None if its operations are not the same."""
    folded = _folded(program)
    operations = lambda p: [(n.primitive, len(n.outputs)) for n in p.nodes]
    if operations(folded) != operations(model.program):
        return None
    if len(folded.inputs) != len(model.program.inputs):
        return None
    values = lambda p: [*p.inputs, *(v for n in p.nodes for v in n.outputs)]
    here = dict(zip(values(model.program), values(folded)))
    named_by_users = (n for n in folded.nodes if n.primitive == name_p.name)
    names = {n.outputs[0]: n.eqn.params["name"] for n in named_by_users}

    def moved(c: Candidate) -> Candidate:
        named = tuple(here[v] for v in c.named)
        own = names[named[0]] if named else c.name
        return dataclasses.replace(c, value=here[c.value], named=named, name=own)

    return Layer(model.label, folded, tuple(map(moved, model.candidates)), program)


def _folded(program: Program) -> Program:
    return with_rules(with_softmaxes(program))


def _tagged(program: Program, found: Sequence[Candidate]) -> Callable[..., list]:
    """`program` as a function of its inputs with the tags in it."""
    outside = {c.value: c for c in found}
    replaced = {v for c in found for v in c.named}
    nodes = []
    for node in program.nodes:
        if not replaced.isdisjoint(node.outputs):
            node = dataclasses.replace(node, call=lambda x: (x,))
        tangent = _own_tangent(node)
        if tangent is not None and node.outputs[0] in outside:
            node = _with_tag(node, outside.pop(node.outputs[0]), tangent)
        elif isinstance(node.call, DerivativeRule) and node.call.saved in outside:
            name = outside.pop(node.call.saved).name
            node = dataclasses.replace(node, call=node.call.named(name))
        nodes.append(node)
    tagged = dataclasses.replace(program, nodes=tuple(nodes))

    def after(value: int, x):
        if value not in outside:
            return x
        return _tag(outside[value], x)

    return lambda *arguments: tagged.run(arguments, after)


def _own_tangent(node: Node) -> Callable | None:
    """The tangent of an operation whose derivative reads its own result, else None."""
    if isinstance(node.call, Softmax):
        return functools.partial(softmax_tangent, axis=node.call.axes)
    return None if node.call is not None else _READS_ITSELF.get(node.primitive)


def _with_tag(node: Node, candidate: Candidate, tangent: Callable) -> Node:
    tagging = functools.partial(_tag, candidate)
    call = tagged_within(lambda x: node.bind([x])[0], tangent, tagging)
    return dataclasses.replace(node, call=lambda x: (call(x),))


def _tag(candidate: Candidate, x):
    """`x` with its tag. What `checkpoint_name` named keeps that, and loses nothing unasked."""
    if candidate.named:
        return checkpoint_name(x, candidate.name)
    return tag(x, candidate.name, kind=candidate.kind)


def _worth_it(graph: LayerGraph, found: Sequence[Candidate]) -> list[Candidate]:
    """Those that the derivative reads, and those from which alone it can remake what it reads.

    A product's result that only a bias and a next product follow is one of neither: where the next
    candidates are saved, nothing reads it.
    """
    read = _read(graph)
    tagged = {c.value for c in found} | {v for node in graph.tags for v in node.outputs}

    def stood_for(value: int) -> bool:
        """Whether the candidates after the value stand between it and all that is read."""
        for node in graph.used_by(value):
            if is_costly(node):
                return False
            for v in node.outputs:
                if v in tagged or (v in graph.outputs and v not in read):
                    continue
                if v in read or not stood_for(v):
                    return False
        return True

    given = {*graph.program.inputs}
    # Bits would be drawn again. Of what a rule saves no value of the program tells.
    always = ("mask", EXACT)

    def worth_it(c: Candidate) -> bool:
        kept = (c.value in given or c.kind in always) and c.value not in graph.owned
        return kept or c.value in read or not stood_for(c.value)

    return [_owned(graph, c) for c in found if worth_it(c)]


def _owned(graph: LayerGraph, candidate: Candidate) -> Candidate:
    """The candidate, in the place of the user's `checkpoint_name`s of the same tensor, where these
    do not suffice: the derivative reads the value from before them.
    """
    nodes = graph.owned.get(candidate.value, ())
    if not nodes:
        return candidate
    named = tuple(node.outputs[0] for node in nodes)
    return dataclasses.replace(candidate, named=named, name=nodes[0].eqn.params["name"])


# What the derivative of a program reads. A search traces one step a hundred times, each time under
# another assignment, and the layers that it finds are the same.
_KNOWN: dict[tuple, set[int]] = {}
_MOST_KNOWN = 64


def _read(graph: LayerGraph) -> set[int]:
    """The same as `_read_by_the_derivative`, which is asked once for equal programs."""
    program = graph.program
    inputs = tuple(v if isinstance(v, int) else str(v) for n in program.nodes for v in n.inputs)
    operations = tuple((n.primitive, n.outputs, *_said(n)) for n in program.nodes)
    key = (tuple(map(str, program.avals)), operations, inputs, program.inputs, graph.activations)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _read_by_the_derivative(graph)
    return _KNOWN[key]


def _said(node: Node) -> tuple:
    """What a node does, in words: functions in it are other ones each time that it is traced."""
    params = re.sub(r" at 0x[0-9a-f]+", "", str(node.eqn.params))
    return params, getattr(node.call, "axes", ()), getattr(node.call, "held", ())


def _read_by_the_derivative(graph: LayerGraph) -> set[int]:
    """Values that the derivative reads as they are: it is traced with every value tagged by its
    number, and the tags that it meets first are collected.
    """
    program = graph.program
    types = [program.avals[v] for v in program.inputs]
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    inexact = [i for i, aval in enumerate(avals) if is_inexact(aval)]
    every = [
        Candidate(v, "linear", "", name=f"{_NUMBER}{v}")
        for node in program.nodes
        for v in node.outputs
        if graph.inexact(v)
    ]
    tagged = _tagged(program, every)

    def derivative(*arguments):
        # inside a shard_map, what differs from device to device has a type of its own
        arguments = [varying(a, axes_of(aval)) for a, aval in zip(arguments, types)]

        def forward(*floating):
            given = list(arguments)
            for i, x in zip(inexact, floating):
                given[i] = x
            return [x for x in tagged(*given) if is_inexact(x)]

        return jax.vjp(forward, *(arguments[i] for i in inexact))[1]

    flat = flatten(jax.make_jaxpr(derivative)(*avals))
    made = {v: e for e in flat.nodes for v in e.outputs}
    found: set[int] = set()
    seen: set[int] = set()
    todo = [v for v in flat.outputs if isinstance(v, int)]
    while todo:
        v = todo.pop()
        if v in seen or v not in made:
            continue
        seen.add(v)
        eqn = made[v].eqn
        if eqn.primitive is tag_p and eqn.params["name"].startswith(_NUMBER):
            found.add(int(eqn.params["name"].removeprefix(_NUMBER)))
        else:
            todo += made[v].reads
    return found
