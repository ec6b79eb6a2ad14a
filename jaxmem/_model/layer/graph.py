"""A program as a graph: the node that makes a value, the nodes that read it, and the values that it
depends on.

`_trace` has the program itself: a flattened jaxpr (`Flat`), and a rewritable one (`Program`). This
graph indexes a `Program` for questions about layers.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable

import jax
import jax.numpy as jnp

from jaxmem._model.tags.primitive import name_p, tag_p
from jaxmem._trace.jaxpr import Literal, inside, is_reference, matmul_flops
from jaxmem._trace.primitives import COSTLY, RANDOM, REPEATED, TAGS, VIEWS
from jaxmem._trace.rewrite import Node, Program, following

SOFTMAX = "softmax"  # the primitive of a node that stands for a whole softmax
RULE = "rule"  # the primitive of a call whose derivative saves more than its operands


class LayerGraph:
    """A program with an index of its values.

    activations: inputs that earlier layers computed. The other inputs are parameters, masks and
      keys, which are in memory under every plan.
    frozen: inputs without a derivative.
    """

    def __init__(self, program: Program, activations: Iterable[int], frozen: Iterable[int] = ()):
        self.program = program
        self.activations, self.frozen = frozenset(activations), frozenset(frozen)
        self.outputs = {v for v in program.outputs if isinstance(v, int)}
        self.maker = {v: node for node in program.nodes for v in node.outputs}
        self.users: dict[int, list[Node]] = {}
        for node in program.nodes:
            for v in dict.fromkeys(node.reads):
                self.users.setdefault(v, []).append(node)

    @functools.cached_property
    def order(self) -> dict[int, int]:
        """For each value, the position of the node that makes it; -1 for inputs and constants."""
        nodes = self.program.nodes
        made = {v: i for i, node in enumerate(nodes) for v in node.outputs}
        return dict.fromkeys(range(len(self.program.avals)), -1) | made

    @functools.cached_property
    def tags(self) -> list[Node]:
        """The user's own tags, and values named by `checkpoint_name`."""
        return [n for n in self.program.nodes if n.primitive in TAGS]

    @functools.cached_property
    def owned(self) -> dict[int, tuple[Node, ...]]:
        """For each value, the user's `checkpoint_name`s of its tensor, in order: of the value
        itself, or of a view or cast of the value.
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
        return following(self.program.nodes, self.activations)

    @functools.cached_property
    def noise(self) -> set[int]:
        """Values that depend on random bits."""
        made = (v for n in self.program.nodes if n.primitive in RANDOM for v in n.outputs)
        return following(self.program.nodes, made)

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
        """Whether the value is the sum of two activations of equal size, and is read more than
        once: a residual stream.
        """
        node = self.maker.get(value)
        if node is None or node.primitive != "add" or len(self.used_by(value)) < 2:
            return False
        alike = [v for v in node.reads if v in self.live and self.bytes(v) == self.bytes(value)]
        return len(alike) == 2


def is_costly(node: Node) -> bool:
    """Whether recomputing the node costs as much as a matrix product or a convolution."""
    if node.primitive == "dot_general" and not node.eqn.params["dimension_numbers"][0][0]:
        return False  # no sum: for example an einsum that scales the channels of a norm
    costly = node.primitive == RULE or (node.call is None and node.primitive in COSTLY)
    return costly or flops(node) > 0


def flops(node: Node) -> float:
    """Returns the FLOPs of the matrix products in a node; 0 for a node that replaces others."""
    return 0.0 if node.call is not None else matmul_flops(node.eqn)[0]


def has_effects(node: Node) -> bool:
    """Whether a node reads, writes or makes a `jax.Ref`, or calls Python by `io_callback`, or is a
    loop whose iterations do: no block may. The references inside a Pallas kernel are its own.
    """
    calls = any("IOEffect" in type(effect).__name__ for effect in node.eqn.effects)
    loop = inside(node.eqn, lambda e: e.primitive.name != "pallas_call")
    eqns = (node.eqn, *loop) if node.primitive == "scan" else (node.eqn,)
    return calls or any(is_reference(v.aval) for eqn in eqns for v in (*eqn.invars, *eqn.outvars))


def is_inexact(aval) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def is_complex(aval) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.complexfloating)


def aval_bytes(aval) -> int:
    """Returns the bytes of a value; 0 for a value that cannot be saved, such as a key or a
    token.
    """
    if not hasattr(aval, "dtype") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def shape_of(aval) -> jax.ShapeDtypeStruct:
    """Returns the shape and the dtype of a value, with its sharding on an explicit mesh."""
    sharding = getattr(aval, "sharding", None)
    explicit = sharding is not None and any(sharding.spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding if explicit else None)


def through(graph: LayerGraph, value, follow: Callable[[Node], bool]) -> tuple[int | Literal, list]:
    """Follows first operands back from `value` through nodes for which `follow` is true. Returns
    the first value, and the nodes from the last to the first.
    """
    passed = []
    while isinstance(value, int) and (node := graph.maker.get(value)) and follow(node):
        if not node.reads:
            break
        passed.append(node)
        value = node.reads[0]
    return value, passed


def views_of(program: Program, sources: Collection[int]) -> list[Node]:
    """Returns the casts and views of `sources` alone."""
    found, known = [], {*sources, *program.constants}
    of_sources = set(sources)
    for node in program.nodes:
        reads_one = not of_sources.isdisjoint(node.reads)
        if node.primitive in REPEATED and reads_one and known.issuperset(node.reads):
            found.append(node)
            known.update(node.outputs)
            of_sources.update(node.outputs)
    return found
