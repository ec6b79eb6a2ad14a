"""A traced function as a list of nodes that can be replaced, and run again as the user wrote it.

`jaxpr.flatten` reads programs that are differentiated already; this one is for what will be: rules
of custom derivatives stay whole, and each operation keeps its place in the source and in the model.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr

from jaxmem._trace.jaxpr import Jaxpr, JaxprEqn, Literal, call_body, subjaxprs
from jaxmem._trace.primitives import RULES


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation: of the user's, or what replaces some of them.

    primitive: JAX's name of the operation, or what a replacement stands for.
    inputs: numbers of values, and literals.
    outputs: numbers of values.
    path: the modules and functions that it is in, from the outermost.
    eqn: JAX's equation; that of the last operation where several are replaced.
    names: JAX's stack of names, which the compiled program shows.
    call: what runs in the place of `eqn`, from operands to a sequence of results.
    """

    primitive: str
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]
    path: tuple[str, ...]
    eqn: JaxprEqn
    names: Any
    call: Callable[..., Sequence] | None = None

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(v for v in self.inputs if isinstance(v, int))

    def run(self, operands: Sequence) -> Sequence:
        """The results, computed under the user's names, so that messages and compiled programs show
        the user's lines.
        """
        # The names of what surrounds the call come first, as they would without rewriting.
        names = source_info_util.current_name_stack() + self.names
        place = source_info_util.user_context(self.eqn.source_info.traceback, name_stack=names)
        with place, self.eqn.ctx.manager:
            return self.bind(operands)

    def bind(self, operands: Sequence) -> Sequence:
        """The results, under the names of whoever calls."""
        if self.call is not None:
            return self.call(*operands)
        bound = self.eqn.primitive.get_bind_params(self.eqn.params)
        # a tuple in some versions of JAX
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        results = self.eqn.primitive.bind(*functions, *operands, **params)
        return results if self.eqn.primitive.multiple_results else (results,)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays as nodes in order. Values are numbered; `constants` are those with a
    known array, which may be a tracer of a surrounding trace.
    """

    avals: tuple[Any, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Literal, ...]
    constants: dict[int, Any]

    def run(self, arguments: Sequence, after: Callable | None = None) -> list:
        """The outputs for `arguments`. `after(value, array)` may replace what a value is."""
        values = dict(self.constants)
        for v, x in zip(self.inputs, arguments):
            values[v] = x if after is None else after(v, x)
        for node in self.nodes:
            operands = [v.val if isinstance(v, Literal) else values[v] for v in node.inputs]
            results = node.run(operands)
            if after is not None:
                # Part of a program may be under another mesh, whose axes are automatic there.
                with node.eqn.ctx.manager:
                    results = [after(v, x) for v, x in zip(node.outputs, results)]
            values.update(zip(node.outputs, results))
        return [v.val if isinstance(v, Literal) else values[v] for v in self.outputs]


def program_of(closed: ClosedJaxpr, opaque: Callable[[JaxprEqn], bool]) -> Program:
    """A trace with its calls inlined, those aside that are `opaque`: among them checkpoints, so
    that what they would recompute is no longer decided.
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

    def inline(jaxpr: Jaxpr | ClosedJaxpr, arguments, path: tuple[str, ...], names) -> list:
        closed = isinstance(jaxpr, ClosedJaxpr)
        inner, consts = (jaxpr.jaxpr, jaxpr.consts) if closed else (jaxpr, ())
        env: dict = dict(zip(inner.invars, arguments))
        env |= {v: constant(c, v.aval) for v, c in zip(inner.constvars, consts)}
        read = lambda v: v if isinstance(v, Literal) else env[v]
        for eqn in inner.eqns:
            operands = tuple(read(v) for v in eqn.invars)
            stack = names + eqn.source_info.name_stack
            here = (*path, *_parts(eqn.source_info.name_stack))
            name = eqn.primitive.name
            called = None if name in RULES or _shards(eqn) or opaque(eqn) else call_body(eqn)
            if called is not None:
                function = f"@{eqn.params.get('name') or ''}"
                outputs = inline(called, operands, (*here, function), stack)
            else:
                outputs = [new(v.aval) for v in eqn.outvars]
                nodes.append(Node(name, operands, tuple(outputs), here, eqn, stack))
            env.update(zip(eqn.outvars, outputs))
        return [read(v) for v in inner.outvars]

    inputs = [new(v.aval) for v in closed.jaxpr.invars]
    outputs = inline(closed, inputs, (), source_info_util.new_name_stack())
    return Program(tuple(avals), tuple(nodes), tuple(inputs), tuple(outputs), constants)


def standing_for(
    last: Node, primitive: str, inputs: Sequence, outputs: Sequence[int], call: Callable
) -> Node:
    """A node that runs `call` in the place of several, `last` being the last of them. Their names
    are entered within.
    """
    names = source_info_util.new_name_stack()
    return Node(primitive, tuple(inputs), tuple(outputs), (), last.eqn, names, call)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation, those of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from equations(inner)


def is_differentiated(jaxpr: Jaxpr) -> bool:
    """Whether a program holds the backward of a derivative."""
    return any("transpose(" in str(eqn.source_info.name_stack) for eqn in equations(jaxpr))


def _parts(stack) -> tuple[str, ...]:
    return tuple(part for part in str(stack).split("/") if part)


def _shards(eqn: JaxprEqn) -> bool:
    """Whether a call says where its arguments or results lie: inlined, it would not."""
    said = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in said)
