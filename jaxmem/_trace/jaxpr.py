"""Reads jaxprs: equations at every depth, the bodies of calls and loops, the FLOPs of matrix
products, and the lines of the user's program.
"""

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as as_function
from jax.interpreters import partial_eval
from jax.ref import AbstractRef

from jaxmem._core.lists import merged, separated
from jaxmem._trace.primitives import CALLS
from jaxmem._trace.vary import mapped_axes


def nbytes(aval) -> int:
    """Bytes of an array by its dtype's item size, which is a whole byte for int4 too."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def is_reference(aval) -> bool:
    """Whether an aval is the type of a `jax.Ref`."""
    return isinstance(aval, AbstractRef)


def per_device(size: int, shards: int) -> int:
    """The part of `size` bytes that one of `shards` devices stores, rounded up."""
    return -(-size // shards)


def _shape(atom) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    aval: Any = atom.aval
    return aval.shape


def body(value) -> Jaxpr | None:
    """The open jaxpr of a jaxpr-like parameter, else None."""
    # Remove with JAX 0.10: `ClosedJaxpr`, which is `Jaxpr` itself from JAX 0.11 on. JAX 0.12 marks
    # the attribute `jaxpr` and the constructor `ClosedJaxpr(jaxpr, consts)` for removal.
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


def hijax_params(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of the `jax.experimental.hijax.HiPrim` that an equation applies; none for any
    other equation. JAX has a single primitive for all of them.
    """
    return getattr(eqn.params.get("_prim"), "params", {})


def subjaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields every jaxpr among an equation's parameters: bodies, branches, conditions."""
    for value in (hijax_params(eqn) or eqn.params).values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if (inner := body(item)) is not None:
                yield inner


def needed(jaxpr: Jaxpr) -> tuple[Jaxpr, list[bool]]:
    """The jaxpr without equations that no result depends on, and for each input whether the jaxpr
    still reads it.
    """
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))


def on_open(program: Jaxpr | ClosedJaxpr, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A program that is changed as an open jaxpr, and that keeps its constants. A program that
    `change` returns unchanged stays the same object.
    """
    # Remove with JAX 0.10: there a closed program is no `Jaxpr`.
    if isinstance(program, Jaxpr):
        return change(program)
    new = change(program.jaxpr)
    return program if new is program.jaxpr else program.replace(jaxpr=new)


def with_programs(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """The equation with every jaxpr among its parameters changed."""

    def changed(param):
        if type(param) in (tuple, list):  # others have names, such as the description of a key
            return type(param)(map(changed, param))
        return param if body(param) is None else on_open(param, change)

    return eqn.replace(params={name: changed(param) for name, param in eqn.params.items()})


def equations(
    jaxpr: Jaxpr, enters: Callable[[JaxprEqn], bool] = lambda eqn: True
) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr, and of the jaxprs inside the equations that `enters` allows."""
    for eqn in jaxpr.eqns:
        yield eqn
        if enters(eqn):
            yield from inside(eqn, enters)


def inside(
    eqn: JaxprEqn, enters: Callable[[JaxprEqn], bool] = lambda eqn: True
) -> Iterator[JaxprEqn]:
    """Every equation of the jaxprs inside one equation, which is entered in any case."""
    for inner in subjaxprs(eqn):
        yield from equations(inner, enters)


def as_closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with its constants; an open jaxpr, such as the body of a checkpoint, has none."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def call_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that a call primitive runs; None for every other primitive."""
    names = ("jaxpr", "call_jaxpr") if eqn.primitive.name in CALLS else ()
    return next((as_closed(eqn.params[k]) for k in names if k in eqn.params), None)


def bind(eqn: JaxprEqn, operands: Sequence) -> Sequence:
    """The results of an equation for other operands."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else (results,)


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan's parts.

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
    # The parts follow from shapes. A sliced input loses its leading axis in the body. A stacked
    # output gains one outside. A carried value has one shape in both.
    # Remove with JAX 0.10: its parameters `num_consts` and `num_carry` became `ft_in` in JAX 0.11.
    xs = sum(len(_shape(o)) > len(_shape(i)) for o, i in zip(eqn.invars, inner.invars))
    carry = sum(len(_shape(o)) == len(_shape(i)) for o, i in zip(eqn.outvars, inner.outvars))
    return Scan(eqn.params["length"], inner, len(inner.invars) - xs - carry, carry)


def extended_scan(eqn: JaxprEqn, inner: Jaxpr, sliced: Sequence[Var]) -> JaxprEqn:
    """A scan with another body. The body reads the slices of the arrays `sliced` after its other
    inputs, and may have more results, whose stacks are the last results of the scan.
    """
    scan = as_scan(eqn)
    assert scan is not None
    xs = len(inner.invars) - scan.consts - scan.carry
    params = eqn.params | _scan_layout(scan.consts, scan.carry, xs, len(inner.outvars) - scan.carry)
    params["jaxpr"] = on_open(params["jaxpr"], lambda _: inner)
    invars = [*eqn.invars, *sliced]
    avals, _ = eqn.primitive.abstract_eval(*(v.aval for v in invars), **params)
    more = [Var(aval) for aval in avals[len(eqn.outvars) :]]
    return eqn.replace(params=params, invars=invars, outvars=[*eqn.outvars, *more])


@functools.cache
@jax.disable_jit(False)
def _scan_layout(consts: int, carry: int, xs: int, ys: int) -> dict[str, Any]:
    """The parameters by which a scan tells its constants, its carry and its slices apart. They are
    read from a trace, since JAX 0.11 has other ones than JAX 0.10.
    """

    def run(consts, carry, xs):
        def body(carry, slices):
            total = sum([*consts, *carry, *slices])
            return [c + total for c in carry], [total + i for i in range(ys)]

        return jax.lax.scan(body, carry, xs, length=1)

    traced = jax.make_jaxpr(run)([0.0] * consts, [0.0] * carry, [np.zeros(1)] * xs)
    (params,) = (e.params for e in traced.eqns if e.primitive.name == "scan")
    return {k: params[k] for k in params.keys() - {"jaxpr", "length", "reverse", "unroll"}}


def as_loop(eqn: JaxprEqn) -> Scan | None:
    """Reads the parts of a scan or of a while loop. A while loop is read as one iteration of a scan
    that carries all its results. Returns None for every other primitive.
    """
    if eqn.primitive.name != "while":
        return as_scan(eqn)
    inner = body(eqn.params["body_jaxpr"])
    assert inner is not None
    carry = len(eqn.outvars)
    return Scan(1, inner, len(inner.invars) - carry, carry)


def matmul_flops(eqn: JaxprEqn) -> tuple[float, int]:
    """Returns FLOPs and number of matrix products of one equation. Products in inner loops count
    once for each iteration, products in a Pallas kernel once for each step of its grid. FLOPs in a
    `shard_map` are multiplied by its devices. A convolution counts as a product, a `while` as one
    iteration, a `cond` as its most expensive branch.
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
    devices = 1 if (axes := mapped_axes(eqn)) is None else math.prod(axes.values())
    return devices * trips * sum(f for f, _ in sums), trips * sum(n for _, n in sums)


def text_of(program) -> str:
    """Returns a traced program as text without addresses: equal programs have equal texts."""
    return re.sub(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}", "", str(program))


def lift(closed: ClosedJaxpr) -> tuple[Any, list]:
    """Makes the traced arrays that `closed` closes over explicit arguments.

    Returns a function of (lifted, *arguments), and `lifted`: those arrays. Constants that are no
    tracers stay closed over.
    """
    traced = [isinstance(c, Tracer) for c in closed.consts]
    lifted, others = separated(closed.consts, traced)

    def call(lifted, *arguments):
        consts = merged((lifted, others), traced)
        return as_function(ClosedJaxpr(closed.jaxpr, consts))(*arguments)

    return call, lifted


_FRAMES = 32  # of the call stack that are looked at
_PACKAGES = "site-packages" + os.sep
# Frames of these libraries name an operation, and no part of a model.
_LAYERS = (
    str(pathlib.Path(__file__).parents[1]) + os.sep,
    *(_PACKAGES + name + os.sep for name in ("flax", "equinox", "haiku", "optax")),
)


def line_of(eqn: JaxprEqn) -> str:
    """The file, line and function that an equation is from, such as "model.py:12:8 (mlp)": the
    innermost line of a model, the user's own or a package's, if there is one, and not of jaxmem's
    or a library of layers. The path is relative to the working directory, or to where packages are.
    "" where JAX kept no trace.
    """
    told = source_info_util.summarize(eqn.source_info, num_frames=_FRAMES)
    frames = [f for f in reversed(told.splitlines()) if f != "unknown"]  # innermost first
    models = [f for f in frames if not any(library in f for library in _LAYERS)]
    line = next(iter(models or frames), "")
    _, installed, inside = line.rpartition(_PACKAGES)
    return inside if installed else line.removeprefix(os.getcwd() + os.sep)
