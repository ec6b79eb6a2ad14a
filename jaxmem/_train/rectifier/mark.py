"""Marks the tags whose outlier channels a codec may separate, where a step is traced for it, and
makes the traced step into a function that returns what is marked. The function computes nothing
that this does not need: neither the backward nor the update.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmem._core.actions import Choice
from jaxmem._cost.profile.options import codecs_for
from jaxmem._model.codecs.outlier import OutlierSeparated
from jaxmem._model.tags.policy import Policy
from jaxmem._model.tags.tag import tag_p
from jaxmem._trace.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Scan,
    as_scan,
    body,
    call_body,
    subjaxprs,
)
from jaxmem._trace.rewrite import equations
from jaxmem.errors import StepError

# An identity that stands where a step's forward computes a tensor, for who reads the trace.
mark_p = Primitive("jaxmem_outliers")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(mark_p, lambda ctx, x, **_: [x])


def _batched(arguments, dims, *, several, **params):
    """A vmap over a forward that was already separated from its backward: each example is a tensor
    with codes of its own, unlike a batch that a tag sees. The examples are moved to the first axis.
    """
    x = jnp.moveaxis(arguments[0], dims[0], 0)
    return mark_p.bind(x, several=several + 1, **params), 0


batching.primitive_batchers[mark_p] = _batched


class Marking:
    """A policy source under which every block marks its tensors, and saves none of them. `build`
    receives it in place of a plan.

    codecs: as `jaxmem.plan` takes them.
    """

    def __init__(self, codecs: Any = None):
        self._codecs = codecs

    def choices_for(self, block: str) -> Mapping[str, Choice]:
        return {}

    def groups(self, block: str) -> tuple[tuple[int, int], ...]:
        return ()

    def policy_for(self, label: str, layers: int) -> Policy:
        return _MarkingPolicy(label, (), layers, _Codecs(self._codecs))


@dataclasses.dataclass(frozen=True, eq=False)
class _Codecs:
    """The codecs that the user passed. They need not be hashable, and a policy must be."""

    given: Any


@dataclasses.dataclass(frozen=True)
class _MarkingPolicy(Policy):
    """Recomputes every tensor, and marks a tensor in the forward if a codec of the tensor separates
    outliers.
    """

    codecs: _Codecs = _Codecs(None)

    def __call__(self, primitive, *avals, **params):
        if primitive is not tag_p:
            return False
        codecs = codecs_for(params["kind"], params["codec"], avals[0].dtype, self.codecs.given)
        separates = any(isinstance(codec, OutlierSeparated) for codec in codecs)
        inexact = jnp.issubdtype(avals[0].dtype, jnp.floating)
        return _Seen(self.block, params["name"]) if separates and inexact else False


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Marks a tag's tensor in the forward. Later operations read the mark's result, so that the
    mark stays in the program.
    """

    block: str
    name: str

    def seen(self, x):
        return mark_p.bind(x, block=self.block, name=self.name, several=0)


Found = list[tuple[tuple[str, str], Any]]  # (block, name) and what is made of the tensor there


def reaped(closed: ClosedJaxpr, measure: Callable) -> Callable[..., Found]:
    """A function of the arguments of `closed` that returns what `measure` makes of each tensor that
    is marked, under its block and name, in the order of the program. What a loop marks in each turn
    is stacked.

    Tensors in the body of a `while` loop, or of a `shard_map`, are left out.
    """

    def run(*arguments) -> Found:
        found: Found = []
        _run(closed.jaxpr, closed.consts, arguments, _wanted(closed.jaxpr, ()), measure, found)
        return found

    return run


def _enters(eqn: JaxprEqn) -> bool:
    return call_body(eqn) is not None or eqn.primitive.name in ("scan", "cond")


@functools.cache
def _marks(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has a mark at a place that `reaped` searches."""
    return any(map(_holds, jaxpr.eqns))


def _holds(eqn: JaxprEqn) -> bool:
    """Whether an equation is a mark, or has one in its body."""
    return eqn.primitive is mark_p or (_enters(eqn) and any(map(_marks, subjaxprs(eqn))))


def _wanted(jaxpr: Jaxpr, outputs: Sequence) -> set:
    """The variables of a jaxpr that its marks and the given outputs depend on."""
    wanted = {v for v in outputs if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if _holds(eqn) or wanted.intersection(eqn.outvars):
            wanted.update(v for v in _reads(eqn, wanted) if not isinstance(v, Literal))
    return wanted


def _reads(eqn: JaxprEqn, wanted: set) -> Sequence:
    """The operands of an equation that its wanted outputs and its marks depend on."""
    inner = body(called) if (called := call_body(eqn)) is not None else None
    if inner is not None:
        of = _wanted(inner, [i for i, o in zip(inner.outvars, eqn.outvars) if o in wanted])
        return [o for o, i in zip(eqn.invars, inner.invars) if i in of]
    if (scan := as_scan(eqn)) is not None:
        _, of = _carried(scan, [o in wanted for o in eqn.outvars])
        return [o for o, i in zip(eqn.invars, scan.jaxpr.invars) if i in of]
    return eqn.invars


def _carried(scan: Scan, outputs: Sequence[bool]) -> tuple[list[bool], set]:
    """Which carried values of a scan its wanted outputs and its marks depend on, and the variables
    of its body that are needed.
    """
    carry, inner = list(outputs[: scan.carry]), scan.jaxpr
    stacked = [o for o, w in zip(inner.outvars[scan.carry :], outputs[scan.carry :]) if w]
    enters = inner.invars[scan.consts : scan.consts + scan.carry]
    while True:
        of = _wanted(inner, [*(o for o, w in zip(inner.outvars, carry) if w), *stacked])
        more = [w or i in of for w, i in zip(carry, enters)]
        if more == carry:
            return carry, of
        carry = more


def _run(jaxpr: Jaxpr, consts, arguments, wanted: set, measure: Callable, found: Found) -> dict:
    """Evaluates the wanted variables of a jaxpr, and returns the values by variable. Appends the
    measured marks to `found`.

    Arguments that are not wanted may be None.
    """
    values: dict = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, arguments))
    read = lambda v: v.val if isinstance(v, Literal) else values.get(v)
    for eqn in jaxpr.eqns:
        if not (_holds(eqn) or wanted.intersection(eqn.outvars)):
            continue
        operands = [read(v) for v in eqn.invars]
        with eqn.ctx.manager:
            if eqn.primitive is mark_p:
                of_each = measure
                for _ in range(eqn.params["several"]):
                    of_each = jax.vmap(of_each)
                found.append(((eqn.params["block"], eqn.params["name"]), of_each(operands[0])))
                results: Any = operands
            elif (called := call_body(eqn)) is not None:
                results = _called(called, eqn, operands, wanted, measure, found)
            elif (scan := as_scan(eqn)) is not None:
                results = _scanned(scan, eqn, operands, wanted, measure, found)
            elif eqn.primitive.name == "cond" and _holds(eqn):
                results = _branched(eqn, operands, measure, found)
            else:
                _refuse_effects(eqn)
                results = _bound(eqn, operands)
        values.update(zip(eqn.outvars, results))
    return values


def _called(called, eqn: JaxprEqn, operands, wanted: set, measure: Callable, found: Found) -> list:
    """The results of a call, whose body is evaluated inline; None for unwanted results."""
    inner, consts = (
        (called.jaxpr, called.consts) if isinstance(called, ClosedJaxpr) else (called, ())
    )
    of = _wanted(inner, [i for i, o in zip(inner.outvars, eqn.outvars) if o in wanted])
    values = _run(inner, consts, operands, of, measure, found)
    return _outputs(inner, values)


def _scanned(
    scan: Scan, eqn: JaxprEqn, operands, wanted: set, measure: Callable, found: Found
) -> list:
    """The results of a scan without the carried values and outputs that are not wanted."""
    inner, consts = scan.jaxpr, getattr(eqn.params["jaxpr"], "consts", ())
    outputs = [v in wanted for v in eqn.outvars]
    carry, of = _carried(scan, outputs)
    whole, first = operands[: scan.consts], operands[scan.consts : scan.consts + scan.carry]
    sliced = [
        x if v in of else None
        for x, v in zip(
            operands[scan.consts + scan.carry :], inner.invars[scan.consts + scan.carry :]
        )
    ]
    marks: list = []

    def turn(carried, slices):
        carried = iter(carried)
        entering = [next(carried) if w else None for w in carry]
        here: Found = []
        values = _run(inner, consts, [*whole, *entering, *slices], of, measure, here)
        made = _outputs(inner, values)
        marks[:] = [key for key, _ in here]
        stacked = [x for x, w in zip(made[scan.carry :], outputs[scan.carry :]) if w]
        return [x for x, w in zip(made, carry) if w], (stacked, [x for _, x in here])

    last, (stacked, measured) = jax.lax.scan(
        turn,
        [x for x, w in zip(first, carry) if w],
        sliced,
        length=scan.length,
        reverse=eqn.params["reverse"],
    )
    found += list(zip(marks, measured))
    last, stacked = iter(last), iter(stacked)
    of_carry = [next(last) if w else None for w in carry]
    return [*of_carry, *(next(stacked) if w else None for w in outputs[scan.carry :])]


def _branched(eqn: JaxprEqn, operands, measure: Callable, found: Found) -> list:
    """The results of a conditional. The marks of branches that do not run are NaN."""
    index, *arguments = operands
    pairs = [_branch(closed, measure) for closed in eqn.params["branches"]]
    shapes = [jax.eval_shape(branch, *arguments)[1] for branch, _ in pairs]

    def filled(number: int) -> Callable:
        def call(*arguments):
            results, own = pairs[number][0](*arguments)
            absent = [[jnp.full(s.shape, jnp.nan, s.dtype) for s in of] for of in shapes]
            absent[number] = own
            return results, absent

        return call

    results, measured = jax.lax.switch(index, [filled(n) for n in range(len(pairs))], *arguments)
    found += [pair for (_, keys), xs in zip(pairs, measured) for pair in zip(keys, xs)]
    return results


def _branch(closed: ClosedJaxpr, measure: Callable) -> tuple[Callable, list]:
    """A branch as a function that also returns its marks, and a list that receives the keys of the
    marks when the function is traced.
    """
    inner, keys = closed.jaxpr, []

    def call(*arguments):
        here: Found = []
        values = _run(inner, closed.consts, arguments, _wanted(inner, inner.outvars), measure, here)
        keys[:] = [key for key, _ in here]
        return _outputs(inner, values), [x for _, x in here]

    return call, keys


def _outputs(jaxpr: Jaxpr, values: dict) -> list:
    return [v.val if isinstance(v, Literal) else values.get(v) for v in jaxpr.outvars]


def _refuse_effects(eqn: JaxprEqn) -> None:
    """Raises StepError for a callback that would run twice: in the step, and in the counting
    program.
    """
    inner = (e for jaxpr in subjaxprs(eqn) for e in equations(jaxpr))
    if any(e.primitive.name == "io_callback" for e in (eqn, *inner)):
        raise StepError(
            "track: the forward calls jax.experimental.io_callback, which counting would call once"
            " more; expected a forward without"
        )


def _bound(eqn: JaxprEqn, operands: Sequence) -> Sequence:
    bound = eqn.primitive.get_bind_params(eqn.params)
    # a tuple in some versions of JAX
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = eqn.primitive.bind(*functions, *operands, **params)
    return results if eqn.primitive.multiple_results else (results,)
