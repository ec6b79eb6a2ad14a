"""Everything that reads jaxprs at large: it inlines calls, reads scans, counts matrix products, and
runs pieces of a program.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as as_function

from jaxmem._trace.primitives import CALLS, REMAT
from jaxmem._trace.vary import as_mapped


def nbytes(aval) -> int:
    """Bytes of an array by its dtype's item size, which is a whole byte for int4 too."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def per_device(size: int, shards: int) -> int:
    """The part of `size` bytes that one of `shards` devices stores, rounded up."""
    return -(-size // shards)


def _shape(atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return aval.shape


def body(value) -> Jaxpr | None:
    """The open jaxpr of a jaxpr-like parameter, else None."""
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


def subjaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields every jaxpr among an equation's parameters: bodies, branches, conditions."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if (inner := body(item)) is not None:
                yield inner


def call_body(eqn: JaxprEqn):
    """The jaxpr that a call primitive runs, closed or open; None for every other primitive."""
    if eqn.primitive.name not in CALLS:
        return None
    return next(
        (eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None
    )


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan's parts, told from shapes alone, since their spelling in the parameters differs
    between JAX versions.

    length: its trip count.
    jaxpr: its body.
    consts, carry: how many of its operands it reads whole, and how many it carries; these are the
      first ones, in this order, and the others are sliced.
    """

    length: int
    jaxpr: Jaxpr
    consts: int
    carry: int


def as_scan(eqn: JaxprEqn) -> Scan | None:
    """Reads a scan's parts; None for every other primitive."""
    if eqn.primitive.name != "scan":
        return None
    inner = body(eqn.params["jaxpr"])
    assert inner is not None
    # What is sliced loses its leading axis in the body, and what is stacked gains one outside; what
    # is carried has one shape in both.
    xs = sum(len(_shape(o)) > len(_shape(i)) for o, i in zip(eqn.invars, inner.invars))
    carry = sum(len(_shape(o)) == len(_shape(i)) for o, i in zip(eqn.outvars, inner.outvars))
    return Scan(eqn.params["length"], inner, len(inner.invars) - xs - carry, carry)


def as_loop(eqn: JaxprEqn) -> Scan | None:
    """Reads the parts of a scan, or of a while loop: as a scan of one turn that carries all that it
    returns. None for every other primitive.
    """
    if eqn.primitive.name != "while":
        return as_scan(eqn)
    inner = body(eqn.params["body_jaxpr"])
    assert inner is not None
    carry = len(eqn.outvars)
    return Scan(1, inner, len(inner.invars) - carry, carry)


def matmul_flops(eqn: JaxprEqn) -> tuple[float, int]:
    """Returns FLOPs and number of matrix products of one equation, those of inner loops times their
    trip counts, of a Pallas kernel times the steps of its grid, FLOPs inside `shard_map` times its
    devices. Convolutions count as products, a `while` as one turn, a `cond` as its dearest branch.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(_shape(eqn.invars[0])[d] for d in contract)
        return 2.0 * depth * math.prod(_shape(eqn.outvars[0])), 1
    if name == "conv_general_dilated":
        # Each output element sums over all of the kernel that leads to its own channel.
        kernel = _shape(eqn.invars[1])
        out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) / max(out_channels, 1), 1
    trips = eqn.params.get("length", 1) if name == "scan" else 1
    if name == "pallas_call":  # a side of its grid may be known as it runs alone
        trips = math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    inner = [[matmul_flops(e) for e in j.eqns] for j in subjaxprs(eqn)]
    sums = [(sum(f for f, _ in each), sum(n for _, n in each)) for each in inner]
    if name == "cond":
        return max(sums, default=(0.0, 0))
    devices = 1 if (mapped := as_mapped(eqn)) is None else math.prod(mapped.manual.values())
    return devices * trips * sum(f for f, _ in sums), trips * sum(n for _, n in sums)


@dataclasses.dataclass(frozen=True)
class FlatEquation:
    """An equation of a `Flat`.

    eqn: JAX's own, for its primitive, parameters and shapes.
    inputs: numbers of values, or literals.
    outputs: numbers of values.
    """

    eqn: JaxprEqn
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The inputs that are values."""
        return tuple(v for v in self.inputs if isinstance(v, int))


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr with its calls inlined and its values numbered.

    avals: shapes and dtypes, by number.
    equations: in topological order.
    inputs: numbers of the jaxpr's inputs.
    outputs: numbers or literals.
    constants: number -> array, of the arrays that the jaxpr closes over.
    """

    avals: list
    equations: list[FlatEquation]
    inputs: list[int]
    outputs: list
    constants: dict


def flatten(
    jaxpr: Jaxpr | ClosedJaxpr,
    *,
    barriers: bool = False,
    body_of: Callable[[JaxprEqn], Any] = call_body,
) -> Flat:
    """Inlines the calls of a jaxpr, at every depth. Loops and conditionals stay equations.

    barriers: leaves an equation before the body of each checkpoint of a backward that JAX lowers
      behind a barrier: it has that checkpoint's primitive, and hands on the values that are read.
    body_of: the jaxpr that is put in an equation's place, or None where the equation stays.
    """
    avals, equations, constants = [], [], {}

    def new(aval) -> int:
        avals.append(aval)
        return len(avals) - 1

    def constant(value, aval) -> int:
        number = new(aval)
        constants[number] = value
        return number

    def go(jaxpr, arguments):
        """Adds a jaxpr's equations, its inputs being `arguments`; returns its outputs."""
        inner, consts = (
            (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())
        )
        # Variables are looked up in the jaxpr at hand alone: a jaxpr that is called twice has its
        # equations added twice, with new numbers.
        env = {v: constant(c, v.aval) for v, c in zip(inner.constvars, consts)} | dict(
            zip(inner.invars, arguments)
        )
        read = lambda v: v if isinstance(v, Literal) else env[v]
        for eqn in inner.eqns:
            operands = tuple(read(v) for v in eqn.invars)
            if (called := body_of(eqn)) is not None:
                if barriers and _is_behind_barrier(eqn):
                    values = tuple(v for v in operands if isinstance(v, int))
                    behind = {v: new(avals[v]) for v in dict.fromkeys(values)}
                    equations.append(FlatEquation(eqn, tuple(behind), tuple(behind.values())))
                    operands = tuple(
                        behind.get(v, v) if isinstance(v, int) else v for v in operands
                    )
                outputs = go(called, operands)
            else:
                outputs = tuple(new(v.aval) for v in eqn.outvars)
                equations.append(FlatEquation(eqn, operands, outputs))
            env.update(zip(eqn.outvars, outputs))
        return [read(v) for v in inner.outvars]

    top = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    inputs = [new(v.aval) for v in top.invars]
    return Flat(avals, equations, inputs, go(jaxpr, inputs), constants)


def _is_behind_barrier(eqn: JaxprEqn) -> bool:
    """Whether JAX keeps XLA from running the equation before all that it reads is there, such as
    the cotangents of a layer's results.
    """
    wanted = eqn.params.get("prevent_cse")
    wanted = any(wanted) if isinstance(wanted, tuple) else bool(wanted)
    return eqn.primitive.name in REMAT and bool(eqn.params.get("differentiated")) and wanted


def reads(closed: ClosedJaxpr) -> list[bool]:
    """Returns for each input whether any of the outputs depends on it."""
    flat = flatten(closed)
    wanted = {v for v in flat.outputs if isinstance(v, int)}
    for e in reversed(flat.equations):
        if wanted.intersection(e.outputs):
            wanted.update(e.reads)
    return [v in wanted for v in flat.inputs]


def run(equations: Sequence[FlatEquation], values: dict) -> dict:
    """Evaluates equations in order over `values` (number -> array), and returns these with the
    results added.

    A collective over a mesh axis that is not there gives an array of its shape, so that what
    surrounds it can be timed.
    """
    values = dict(values)
    for e in equations:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in e.inputs]
        bound = e.eqn.primitive.get_bind_params(e.eqn.params)
        # a tuple in some versions of JAX
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        try:
            results = e.eqn.primitive.bind(*functions, *operands, **params)
        except NameError:  # JAX's error for an axis name that no mesh binds
            values.update(zip(e.outputs, [_like(v, operands) for v in e.eqn.outvars]))
            continue
        values.update(zip(e.outputs, results if e.eqn.primitive.multiple_results else (results,)))
    return values


def _like(atom, operands):
    """An array of the atom's shape that depends on the first operand."""
    aval: Any = atom.aval
    first = jnp.ravel(operands[0])[0] if operands else 0
    return jnp.full(aval.shape, first, aval.dtype)


_OWN = ("name", "sharding", "layout", "start_indices", "limit_indices")  # of an equation's params


def describe(equation: FlatEquation, avals: list) -> str:
    """Returns a text that is equal for equal work: primitive, shapes and parameters.

    It leaves out addresses and names, and what tells one layer of a Python loop from the next:
    where a slice of stacked parameters begins, and which number is folded into a random key.
    """
    shape = lambda v: avals[v].str_short() if isinstance(v, int) else f"number {v.aval.str_short()}"
    operands = [shape(v) for v in equation.inputs]
    params = sorted((k, str(v)) for k, v in equation.eqn.params.items() if k not in _OWN)
    text = f"{equation.eqn.primitive.name} {operands} {params}"
    return text_of(text)


def text_of(program) -> str:
    """Returns a traced program as text without addresses: equal programs have equal texts."""
    return re.sub(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}", "", str(program))


def lift(closed: ClosedJaxpr) -> tuple[Any, list]:
    """Makes the traced arrays that `closed` closes over explicit arguments.

    Returns a function of (lifted, *arguments), and `lifted`: those arrays. Constants that are no
    tracers stay closed over.
    """
    traced = [isinstance(c, Tracer) for c in closed.consts]

    def call(lifted, *arguments):
        own = iter(lifted)
        consts = [next(own) if is_traced else c for c, is_traced in zip(closed.consts, traced)]
        return as_function(ClosedJaxpr(closed.jaxpr, consts))(*arguments)

    return call, [c for c, is_traced in zip(closed.consts, traced) if is_traced]
