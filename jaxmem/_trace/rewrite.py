"""A traced function as a flat list of nodes, which can be read, replaced, and run again.

Calls are inlined, and values are numbered. `flatten` inlines every call, and serves readers of
programs that are differentiated already. `program_of` serves programs that will be differentiated:
rules of custom derivatives stay whole. A node keeps its source line and its name in the model, so
that messages and compiled programs show the user's lines.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jaxmem._trace.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    as_closed,
    bind,
    call_body,
    equations,
    text_of,
)
from jaxmem._trace.primitives import REMAT, RULES
from jaxmem._trace.vary import mapped_axes

_NO_NAMES = source_info_util.new_name_stack()


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation: an equation of the user's, or what replaces some of them.

    primitive: JAX's name of the operation, or the name of a replacement.
    inputs: numbers of values, and literals.
    outputs: numbers of values.
    eqn: JAX's equation; the last one where several are replaced.
    path: the modules and functions that contain the operation, outermost first.
    names: JAX's stack of names, which the compiled program shows.
    call: runs instead of `eqn`, from operands to a sequence of results.
    checkpoint: the positions in the whole program of the operations inside the outermost
      `jax.checkpoint` around this operation; empty outside checkpoints, and in a backward.
    """

    primitive: str
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]
    eqn: JaxprEqn
    path: tuple[str, ...] = ()
    names: Any = _NO_NAMES
    call: Callable[..., Sequence] | None = None
    checkpoint: range = range(0)

    @property
    def reads(self) -> tuple[int, ...]:
        """The inputs that are values."""
        return tuple(v for v in self.inputs if isinstance(v, int))

    def run(self, operands: Sequence) -> Sequence:
        """The results, computed under the user's names, so that messages and compiled programs show
        the user's lines.
        """
        # The names of what surrounds the call come first, as they would without rewriting.
        names = source_info_util.current_name_stack() + self.names
        context = source_info_util.user_context(self.eqn.source_info.traceback, name_stack=names)
        with context, self.eqn.ctx.manager:
            return self.bind(operands)

    def bind(self, operands: Sequence) -> Sequence:
        """The results, under the names of whoever calls."""
        return bind(self.eqn, operands) if self.call is None else self.call(*operands)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays as nodes, with numbered values.

    avals: shapes and dtypes, by number.
    nodes: in topological order.
    inputs: numbers of the function's inputs.
    outputs: numbers or literals.
    constants: number -> array, of the arrays that the function closes over. An array may be a
      tracer of a surrounding trace.
    """

    avals: tuple[Any, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Literal, ...]
    constants: dict[int, Any]

    def run(self, arguments: Sequence, after: Callable | None = None) -> list:
        """The outputs for `arguments`. `after(value, array)` may replace the array of a value."""

        def results_of(node: Node, operands: Sequence) -> Sequence:
            results = node.run(operands)
            if after is None:
                return results
            # Part of a program may be under another mesh, whose axes are automatic there.
            with node.eqn.ctx.manager:
                return [after(v, x) for v, x in zip(node.outputs, results)]

        given = (x if after is None else after(v, x) for v, x in zip(self.inputs, arguments))
        values = self.constants | dict(zip(self.inputs, given))
        return evaluated(self.outputs, self.nodes, values, results_of)


def flatten(
    jaxpr: Jaxpr | ClosedJaxpr,
    *,
    barriers: bool = False,
    body_of: Callable[[JaxprEqn], ClosedJaxpr | None] = call_body,
) -> Program:
    """Inlines the calls of a jaxpr, at every depth. Loops and conditionals stay equations.

    barriers: adds a node before the body of each checkpoint of a backward that JAX lowers behind a
      barrier: the node has that checkpoint's primitive, and returns the values that it reads.
    body_of: the jaxpr that is put in place of an equation, or None where the equation stays.
    """
    avals: list[Any] = []
    nodes: list[Node] = []
    constants: dict[int, Any] = {}

    def new(aval) -> int:
        avals.append(aval)
        return len(avals) - 1

    def constant(value, aval) -> int:
        number = new(aval)
        constants[number] = value
        return number

    def inline(closed: ClosedJaxpr, arguments, path: tuple[str, ...], names) -> list:
        """Adds the equations of a jaxpr whose inputs are `arguments`; returns its outputs."""
        inner = closed.jaxpr
        # Variables are looked up in the jaxpr at hand alone: a jaxpr that is called twice has its
        # equations added twice, with new numbers.
        env: dict = dict(zip(inner.invars, arguments))
        env |= {v: constant(c, v.aval) for v, c in zip(inner.constvars, closed.consts)}
        read = lambda v: v if isinstance(v, Literal) else env[v]
        for eqn in inner.eqns:
            operands = tuple(read(v) for v in eqn.invars)
            stack = names + eqn.source_info.name_stack
            here = (*path, *_parts(eqn.source_info.name_stack))
            add = functools.partial(Node, eqn.primitive.name, eqn=eqn, path=here, names=stack)
            if (called := body_of(eqn)) is not None:
                if barriers and _is_behind_barrier(eqn):
                    values = [v for v in operands if isinstance(v, int)]
                    behind = {v: new(avals[v]) for v in dict.fromkeys(values)}
                    nodes.append(add(tuple(behind), tuple(behind.values())))
                    operands = tuple(
                        behind.get(v, v) if isinstance(v, int) else v for v in operands
                    )
                function = f"@{eqn.params.get('name') or ''}"
                first = len(nodes)
                outputs = inline(called, operands, (*here, function), stack)
                if eqn.primitive.name in REMAT and not eqn.params["differentiated"]:
                    whole = range(first, len(nodes))
                    nodes[first:] = (
                        dataclasses.replace(n, checkpoint=whole) for n in nodes[first:]
                    )
            else:
                outputs = [new(v.aval) for v in eqn.outvars]
                nodes.append(add(operands, tuple(outputs)))
            env.update(zip(eqn.outvars, outputs))
        return [read(v) for v in inner.outvars]

    closed = as_closed(jaxpr)
    inputs = tuple(new(v.aval) for v in closed.jaxpr.invars)
    outputs = tuple(inline(closed, inputs, (), _NO_NAMES))
    return Program(tuple(avals), tuple(nodes), inputs, outputs, constants)


def program_of(closed: ClosedJaxpr, opaque: Callable[[JaxprEqn], bool]) -> Program:
    """Inlines the calls of a trace. Calls with a derivative rule of their own, calls with
    shardings, and `opaque` calls remain. Checkpoints are inlined unless they are opaque, so that
    they no longer decide which values are recomputed.
    """
    stays = lambda eqn: eqn.primitive.name in RULES or _shards(eqn) or opaque(eqn)
    return flatten(closed, body_of=lambda eqn: None if stays(eqn) else call_body(eqn))


@functools.lru_cache(2**12)
def _parts(stack) -> tuple[str, ...]:
    """The names of the modules and functions in a name stack."""
    return tuple(part for part in str(stack).split("/") if part)


def _is_behind_barrier(eqn: JaxprEqn) -> bool:
    """Whether JAX keeps XLA from running the equation before all that it reads is there, such as
    the cotangents of a layer's results.
    """
    wanted = eqn.params.get("prevent_cse")
    wanted = any(wanted) if isinstance(wanted, tuple) else bool(wanted)
    return eqn.primitive.name in REMAT and bool(eqn.params.get("differentiated")) and wanted


def _shards(eqn: JaxprEqn) -> bool:
    """Whether a call says where its arguments or results lie: inlined, it would not."""
    said = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(map(_is_said, said))


def _is_said(sharding) -> bool:
    """Whether the user has given a sharding."""
    # Remove with a public name: JAX 0.10 to 0.12 exports none for a sharding that is not given.
    return type(sharding).__name__ != "UnspecifiedValue"


def leading_to(nodes: Sequence[Node], values: Iterable[int | Literal]) -> list[Node]:
    """The nodes that the values depend on, in the order of the program."""
    wanted, found = {v for v in values if isinstance(v, int)}, []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            found.append(node)
            wanted.update(node.reads)
    return found[::-1]


def reads(closed: ClosedJaxpr) -> list[bool]:
    """Returns for each input whether any of the outputs depends on it."""
    flat = flatten(closed)
    read = {v for v in flat.outputs if isinstance(v, int)}
    read.update(v for node in leading_to(flat.nodes, flat.outputs) for v in node.reads)
    return [v in read for v in flat.inputs]


def depending(closed: ClosedJaxpr) -> list[bool]:
    """Returns for each output whether it depends on any of the inputs."""
    flat = flatten(closed)
    found = following(flat.nodes, flat.inputs)
    return [isinstance(v, int) and v in found for v in flat.outputs]


def following(nodes: Iterable[Node], sources: Iterable[int]) -> set[int]:
    """Returns `sources`, and the values of the nodes that depend on any of them."""
    found = set(sources)
    for node in nodes:
        if not found.isdisjoint(node.reads):
            found.update(node.outputs)
    return found


def made_of(
    known: Iterable[int], nodes: Iterable[Any], passes: Callable[[Any], bool] = lambda node: True
) -> set[int]:
    """Returns `known`, and the values that are computed from them alone by nodes for which `passes`
    is true. A node is anything with `reads` and `outputs`.
    """
    found = set(known)
    for node in nodes:
        if passes(node) and found.issuperset(node.reads):
            found.update(node.outputs)
    return found


def bound_anywhere(node: Node, operands: Sequence) -> Sequence:
    """The results of a node. For an axis name that no mesh binds, arrays of their shapes."""
    try:
        return node.bind(operands)
    except NameError:  # JAX's error for an axis name that no mesh binds
        # An array of the result's shape that depends on the first operand.
        first = jnp.ravel(operands[0])[0] if operands else 0
        avals: list[Any] = [v.aval for v in node.eqn.outvars]
        return [jnp.full(aval.shape, first, aval.dtype) for aval in avals]


ResultsOf = Callable[[Node, Sequence], Sequence]  # (a node, its operands) -> its results


def run(nodes: Iterable[Node], values: dict, results_of: ResultsOf = bound_anywhere) -> dict:
    """Evaluates nodes in order over `values` (number -> array), and returns these with the results
    added.

    results_of: the results of a node for its operands. By default a collective over a mesh axis
      that is not there gives an array of its shape, so that what surrounds it can be timed.
    """
    values = dict(values)
    for node in nodes:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in node.inputs]
        values.update(zip(node.outputs, results_of(node, operands)))
    return values


def evaluated(
    wanted: Iterable[int | Literal],
    nodes: Iterable[Node],
    values: dict,
    results_of: ResultsOf = bound_anywhere,
) -> list:
    """Evaluates nodes as `run` does, and returns the arrays of the wanted values."""
    found = run(nodes, values, results_of)
    return [v.val if isinstance(v, Literal) else found[v] for v in wanted]


_OWN = ("name", "sharding", "layout", "start_indices", "limit_indices")  # of an equation's params


def describe(node: Node, avals: Sequence) -> str:
    """Returns a text that is equal for equal work: primitive, shapes and parameters.

    It leaves out addresses and names. It also leaves out the differences between the layers of a
    Python loop: where a slice of stacked parameters begins, and the number that is folded into a
    random key.
    """
    shape = lambda v: avals[v].str_short() if isinstance(v, int) else f"number {v.aval.str_short()}"
    operands = [shape(v) for v in node.inputs]
    params = sorted((k, str(v)) for k, v in node.eqn.params.items() if k not in _OWN)
    return text_of(f"{node.eqn.primitive.name} {operands} {params}")


def is_differentiated(jaxpr: Jaxpr) -> bool:
    """Whether a program holds the backward of a derivative."""
    return any("transpose(" in str(eqn.source_info.name_stack) for eqn in equations(jaxpr))


# -- Nodes instead of others.


def standing_for(
    last: Node, primitive: str, inputs: Sequence, outputs: Sequence[int], call: Callable
) -> Node:
    """A node that runs `call` instead of several, `last` being the last of them. Their names
    are entered within.
    """
    return Node(primitive, tuple(inputs), tuple(outputs), last.eqn, call=call)


def branches(node: Node) -> list[ClosedJaxpr]:
    """The programs inside a `cond`, a `shard_map`, or a `jit` with shardings; of any other node
    none.
    """
    params = node.eqn.params
    if node.primitive == "cond":
        return list(params["branches"])
    if mapped_axes(node.eqn) is not None:
        return [as_closed(params["jaxpr"])]
    return [params["jaxpr"]] if node.primitive == "jit" else []


def with_branches(node: Node, functions: Sequence[Callable[..., Sequence]]) -> Node:
    """The node with `functions` instead of its programs, in their order."""
    params = node.eqn.params
    whole = lambda *operands: tuple(functions[0](*operands))
    if node.primitive == "cond":
        # A conditional's first operand is the number of its branch.
        cases = [lambda *operands, f=f: tuple(f(*operands)) for f in functions]
        call = lambda index, *operands: jax.lax.switch(index, cases, *operands)
    elif (axes := mapped_axes(node.eqn)) is not None:
        call = jax.shard_map(
            whole,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=frozenset(axes),
            check_vma=params["check_vma"],
        )
    else:
        # `jax.jit` takes None where the user said nothing of a sharding.
        said = lambda shardings: tuple(s if _is_said(s) else None for s in shardings)
        call = jax.jit(
            whole,
            in_shardings=said(params["in_shardings"]),
            out_shardings=said(params["out_shardings"]),
        )
    return dataclasses.replace(node, call=call)
