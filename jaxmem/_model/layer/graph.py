"""A program as a graph: who makes a value, who reads it, and what it depends on."""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.ref import AbstractRef

from jaxmem._model.tags.tag import name_p, tag_p
from jaxmem._trace.jaxpr import Literal, matmul_flops
from jaxmem._trace.primitives import COSTLY, RANDOM, TAGS, VIEWS
from jaxmem._trace.rewrite import Node, Program

SOFTMAX = "softmax"  # the primitive of a node that stands for a whole softmax
RULE = "rule"  # that of a call whose derivative saves more than its operands


class LayerGraph:
    """A program, and questions about its values.

    activations: inputs that earlier layers computed; the others are parameters, masks and keys,
      which are in memory whatever is decided.
    """

    def __init__(self, program: Program, activations: Iterable[int]):
        self.program = program
        self.activations = frozenset(activations)
        self.outputs = {v for v in program.outputs if isinstance(v, int)}
        self.maker = {v: node for node in program.nodes for v in node.outputs}
        self.users: dict[int, list[Node]] = {}
        for node in program.nodes:
            for v in dict.fromkeys(node.reads):
                self.users.setdefault(v, []).append(node)

    @functools.cached_property
    def order(self) -> dict[int, int]:
        """By value, the position of the node that makes it; -1 for inputs and constants."""
        nodes = self.program.nodes
        made = {v: i for i, node in enumerate(nodes) for v in node.outputs}
        return dict.fromkeys(range(len(self.program.avals)), -1) | made

    @functools.cached_property
    def tags(self) -> list[Node]:
        """The user's own tags, and values named by `checkpoint_name`."""
        return [n for n in self.program.nodes if n.primitive in TAGS]

    @functools.cached_property
    def owned(self) -> dict[int, tuple[Node, ...]]:
        """By value, the user's `checkpoint_name`s of the same tensor: of the value itself or of a
        view or cast of it, in order.
        """
        found: dict[int, tuple[Node, ...]] = {}
        for node in self.tags:
            if node.primitive == tag_p.name or not node.reads:
                continue
            _, passed = through(self, node.reads[0], self.renames)
            for v in (node.reads[0], *(n.reads[0] for n in passed)):
                found[v] = (*found.get(v, ()), node)
        return found

    @functools.cached_property
    def live(self) -> set[int]:
        """Values that depend on an activation."""
        return self.after(self.activations)

    @functools.cached_property
    def noise(self) -> set[int]:
        """Values that depend on random bits."""
        made = (v for n in self.program.nodes if n.primitive in RANDOM for v in n.outputs)
        return self.after(made)

    def after(self, sources: Iterable[int]) -> set[int]:
        """`sources`, and every value that depends on one of them."""
        found = set(sources)
        for node in self.program.nodes:
            if not found.isdisjoint(node.reads):
                found.update(node.outputs)
        return found

    def used_by(self, value: int) -> list[Node]:
        return self.users.get(value, [])

    def bytes(self, value: int) -> int:
        return aval_bytes(self.program.avals[value])

    def count(self, value: int) -> int:
        return math.prod(self.program.avals[value].shape)

    def renames(self, node: Node) -> bool:
        """Whether a node returns the tensor that it reads, in another form or under a name."""
        if node.primitive not in VIEWS and node.primitive != name_p.name:
            return False
        return bool(node.reads) and self.count(node.reads[0]) == self.count(node.outputs[0])

    def inexact(self, value: int) -> bool:
        return is_inexact(self.program.avals[value])

    def joins(self, value: int) -> bool:
        """Whether two activations of equal size are added here, and the sum is read more than once:
        a residual stream.
        """
        node = self.maker.get(value)
        if node is None or node.primitive != "add" or len(self.used_by(value)) < 2:
            return False
        alike = [v for v in node.reads if v in self.live and self.bytes(v) == self.bytes(value)]
        return len(alike) == 2


def is_costly(node: Node) -> bool:
    """Whether recomputing the node costs a matrix product, a convolution, or as much."""
    if node.primitive == "dot_general" and not node.eqn.params["dimension_numbers"][0][0]:
        return False  # it sums nothing: an einsum that scales the channels of a norm, say
    costly = node.primitive == RULE or (node.call is None and node.primitive in COSTLY)
    return costly or flops(node) > 0


def flops(node: Node) -> float:
    """FLOPs of the matrix products in a node of the user's; 0 for what replaces some."""
    return 0.0 if node.call is not None else matmul_flops(node.eqn)[0]


def uses_references(node: Node) -> bool:
    """Whether a node reads or writes a `jax.Ref`, which no block may."""
    return any(isinstance(v.aval, AbstractRef) for v in node.eqn.invars)


def is_inexact(aval) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def is_complex(aval) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.complexfloating)


def aval_bytes(aval) -> int:
    """0 for what has no bytes that could be saved, such as a key or a token."""
    if not hasattr(aval, "dtype") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def through(graph: LayerGraph, value, follow: Callable[[Node], bool]) -> tuple[int | Literal, list]:
    """The value from which `value` comes by nodes that `follow` allows, along first operands; and
    those nodes, from the last one back.
    """
    passed = []
    while isinstance(value, int) and (node := graph.maker.get(value)) and follow(node):
        if not node.reads:
            break
        passed.append(node)
        value = node.reads[0]
    return value, passed
