"""A layer's program as a block: tagged, under `jax.checkpoint` with the plan's policy."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxmem._core.lists import reached
from jaxmem._model.codecs.registry import EXACT
from jaxmem._model.layer.candidates import MOST_CANDIDATES, Candidate, candidates, named
from jaxmem._model.layer.graph import LayerGraph, is_complex, is_costly, is_inexact, shape_of
from jaxmem._model.layer.rules import DerivativeRule, with_rules
from jaxmem._model.layer.softmax import Softmax, with_softmaxes
from jaxmem._model.tags.operations import (
    exp_tangent,
    sigmoid_tangent,
    softmax_tangent,
    tagged_within,
    tanh_tangent,
)
from jaxmem._model.tags.policy import Policy, for_jax
from jaxmem._model.tags.primitive import name_p, tag_p
from jaxmem._model.tags.tag import tag
from jaxmem._trace.rewrite import Node, Program, flatten, leading_to
from jaxmem._trace.vary import axes_of, varying

_NUMBER = "value "  # begins a tag's name where every value is tagged by its number
_READS_ITSELF = {"tanh": tanh_tangent, "logistic": sigmoid_tangent, "exp": exp_tangent}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer found in a function.

    label: the layer's label in a plan.
    program: the layer's program, with each softmax and each derivative rule as one node.
    candidates: the values that get a tag.
    plain: the layer's program as the user wrote it, without checkpoints.
    line: the user's file and line of the layer's loop, or of its first operation.
    turns: iterations of the layer's loop.
    """

    label: str
    program: Program
    candidates: tuple[Candidate, ...]
    plain: Program
    line: str = ""
    turns: int = 1

    def blocks(
        self, groups: Mapping[range, Policy], prevent_cse: bool
    ) -> dict[range, Callable[..., list]]:
        """Returns the layer as a function of its inputs, for each group of layers. A plan that
        keeps all tensors of every layer makes no block: the layer has no checkpoint.
        """
        first, *others = groups.values()
        if not others and first.choices is None:
            return dict.fromkeys(groups, lambda *arguments: self.plain.run(arguments))
        return {group: self.block(policy, prevent_cse) for group, policy in groups.items()}

    def block_of(self, number: int, groups: Mapping[range, Policy]) -> Callable[..., list]:
        """Returns layer `number` as a function of its inputs, under the policy of its group."""
        blocks = self.blocks(groups, prevent_cse=True)
        return next(block for group, block in blocks.items() if number in group)

    @property
    def tagged(self) -> Callable[..., list]:
        """The layer as a function of its inputs, with a tag on each candidate."""
        return _tagged(self.program, self.candidates)

    def block(self, policy: Any, prevent_cse: bool) -> Callable[..., list]:
        """Returns the layer as a function of its inputs, under a `Policy`."""
        tagged = self.tagged
        if policy.choices is None and any(map(is_complex, self.program.avals)):
            return tagged  # `jax.checkpoint` cannot save complex values, and would save all of them
        return jax.checkpoint(tagged, policy=for_jax(policy), prevent_cse=prevent_cse)


def layer_of(
    program: Program, activations: Sequence[int], label: str, frozen: Sequence[int] = ()
) -> Layer:
    """Returns `program` as a layer: each softmax is one node, each derivative rule has a number for
    its saved tensors, and the candidates are values that the derivative depends on.

    frozen: inputs of `program` without a derivative, such as frozen parameters.
    """
    graph = LayerGraph(_folded(program), activations, frozen)
    found = _worth_it(graph, candidates(graph))
    # If there are too many candidates, the largest remain, in the order in which they are computed.
    largest = sorted(found, key=lambda c: -graph.bytes(c.value))[:MOST_CANDIDATES]
    kept = [c for c in found if c in largest]
    return Layer(label, graph.program, tuple(named(graph, kept)), program)


def layers_of(
    programs: Sequence[Program],
    activations: Sequence[Sequence[int]],
    label: str,
    frozen: Sequence[int] = (),
) -> list[Layer]:
    """Returns equal layers, with equal candidates and names. `frozen` is as for `layer_of`.

    The candidates are found in the second layer, whose input comes from an equal layer. They have
    the same positions in the other layers. A piece of a program may be the only one of its kind.
    """
    model = layer_of(programs[:2][-1], activations[:2][-1], label, frozen)
    own = lambda i: layer_of(programs[i], activations[i], label, frozen)
    return [_like(model, program) or own(i) for i, program in enumerate(programs)]


def _like(model: Layer, program: Program) -> Layer | None:
    """Returns `program` as a layer with the candidates of `model`; None if the operations
    differ.
    """
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
    """Returns the program with each softmax and each derivative rule as one operation."""
    return with_rules(with_softmaxes(program))


def _tagged(program: Program, found: Sequence[Candidate]) -> Callable[..., list]:
    """Returns `program` as a function of its inputs, with a tag on each candidate."""
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
    """Returns the tangent function of an operation whose derivative reads its own result; None for
    other operations.
    """
    if isinstance(node.call, Softmax):
        return functools.partial(softmax_tangent, axis=node.call.axes)
    return None if node.call is not None else _READS_ITSELF.get(node.primitive)


def _with_tag(node: Node, candidate: Candidate, tangent: Callable) -> Node:
    """Returns a node that tags its result inside its derivative rule."""
    tagging = functools.partial(_tag, candidate)
    call = tagged_within(lambda x: node.bind([x])[0], tangent, tagging)
    return dataclasses.replace(node, call=lambda x: (call(x),))


def _tag(candidate: Candidate, x):
    """Returns `x` with its tag. A value that the user named by `checkpoint_name` keeps the name,
    and gets no kind: only a plan that names a codec compresses it.
    """
    if candidate.named:
        return checkpoint_name(x, candidate.name)
    return tag(x, candidate.name, kind=candidate.kind)


def _worth_it(graph: LayerGraph, found: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that the derivative reads, and the candidates without which the
    derivative could not recompute the values that it reads.

    Other candidates are not worth a decision. For example, if only a bias and a product follow the
    result of a product, nothing reads the result when the next candidates are saved.
    """
    read = _read(graph)
    tagged = {c.value for c in found} | {v for node in graph.tags for v in node.outputs}

    def stood_for(value: int) -> bool:
        """Whether every path from the value to a costly operation, or to a read value, passes a
        candidate.
        """
        for node in graph.used_by(value):
            if is_costly(node) and not needed.isdisjoint(node.outputs):
                return False
            for v in node.outputs:
                if v in tagged or (v in graph.outputs and v not in read):
                    continue
                if v in read or not stood_for(v):
                    return False
        return True

    # The values that are read, and the values that they are computed from. A product with frozen
    # parameters may be neither: only its result leads to the layer's output.
    nodes = leading_to(graph.program.nodes, read) if graph.frozen else graph.program.nodes
    needed = {v for node in nodes for v in node.outputs}
    given = {*graph.program.inputs}
    # The recomputation of a mask draws random bits again. The tensors that a rule saves are not
    # values of the program, so `read` never has them.
    always = ("mask", EXACT)

    def worth_it(c: Candidate) -> bool:
        kept = (c.value in given or c.kind in always) and c.value not in graph.owned
        return kept or c.value in read or not stood_for(c.value)

    return [_owned(graph, c) for c in found if worth_it(c)]


def _owned(graph: LayerGraph, candidate: Candidate) -> Candidate:
    """Returns the candidate with the values and the name of the user's `checkpoint_name`s of the
    same tensor, if there are any. They do not suffice alone: the derivative reads the value from
    before them.
    """
    nodes = graph.owned.get(candidate.value, ())
    if not nodes:
        return candidate
    named = tuple(node.outputs[0] for node in nodes)
    return dataclasses.replace(candidate, named=named, name=nodes[0].eqn.params["name"])


# The values that the derivative of a program reads. A search traces one step a hundred times, each
# time under another assignment, and finds equal layers each time.
_KNOWN: dict[tuple, set[int]] = {}
_MOST_KNOWN = 64


def _read(graph: LayerGraph) -> set[int]:
    """Returns the cached result of `_read_by_the_derivative`, which runs once for equal
    programs.
    """
    program = graph.program
    inputs = tuple(v if isinstance(v, int) else str(v) for n in program.nodes for v in n.inputs)
    operations = tuple((n.primitive, n.outputs, *_said(n)) for n in program.nodes)
    key = (tuple(map(str, program.avals)), operations, inputs, program.inputs)
    key += (graph.activations, graph.frozen)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _read_by_the_derivative(graph)
    return _KNOWN[key]


def _said(node: Node) -> tuple:
    """Returns a key of a node's parameters, without addresses: every trace makes new functions."""
    params = re.sub(r" at 0x[0-9a-f]+", "", str(node.eqn.params))
    return params, getattr(node.call, "axes", ()), getattr(node.call, "held", ())


def _read_by_the_derivative(graph: LayerGraph) -> set[int]:
    """Returns the values that the derivative reads directly. The derivative is traced with every
    value tagged by its number, and the first tags on the paths to its residuals are collected.
    """
    program = graph.program
    types = [program.avals[v] for v in program.inputs]
    avals = [*map(shape_of, types)]
    given = zip(program.inputs, avals)
    inexact = [i for i, (v, a) in enumerate(given) if is_inexact(a) and v not in graph.frozen]
    every = [
        Candidate(v, "linear", "", name=f"{_NUMBER}{v}")
        for node in program.nodes
        for v in node.outputs
        if graph.inexact(v)
    ]
    tagged = _tagged(program, every)

    def derivative(*arguments):
        # Inside a shard_map, the type of an array that differs from device to device says so.
        arguments = [varying(a, axes_of(aval)) for a, aval in zip(arguments, types)]

        def forward(*floating):
            given = list(arguments)
            for i, x in zip(inexact, floating):
                given[i] = x
            return [x for x in tagged(*given) if is_inexact(x)]

        return jax.vjp(forward, *(arguments[i] for i in inexact))[1]

    flat = flatten(jax.make_jaxpr(derivative)(*avals))
    made = {v: e for e in flat.nodes for v in e.outputs}
    tagged_by = lambda e: e.eqn.params["name"] if e.eqn.primitive is tag_p else ""
    numbered = {v: name for v, e in made.items() if (name := tagged_by(e)).startswith(_NUMBER)}
    reads = lambda v: () if v in numbered or v not in made else made[v].reads
    read = reached((v for v in flat.outputs if isinstance(v, int)), reads)
    return {int(numbered[v].removeprefix(_NUMBER)) for v in read & numbered.keys()}
