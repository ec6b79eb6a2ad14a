"""Makes a traced step into a function of its arguments that returns what the step has marked, and
computes nothing that this does not need: neither the backward nor the update.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
from jaxmem._train.rectifier.mark import mark_p
from jaxmem.errors import StepError

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
    """Whether something is marked in it where `reaped` looks."""
    return any(
        eqn.primitive is mark_p or (_enters(eqn) and any(map(_marks, subjaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


def _holds(eqn: JaxprEqn) -> bool:
    return eqn.primitive is mark_p or (_enters(eqn) and any(map(_marks, subjaxprs(eqn))))


def _wanted(jaxpr: Jaxpr, outputs: Sequence) -> set:
    """The variables of a jaxpr that its marks and these of its outputs need."""
    wanted = {v for v in outputs if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if _holds(eqn) or wanted.intersection(eqn.outvars):
            wanted.update(v for v in _reads(eqn, wanted) if not isinstance(v, Literal))
    return wanted


def _reads(eqn: JaxprEqn, wanted: set) -> Sequence:
    """What an equation reads for those of its outputs that are wanted, and for its marks."""
    inner = body(called) if (called := call_body(eqn)) is not None else None
    if inner is not None:
        of = _wanted(inner, [i for i, o in zip(inner.outvars, eqn.outvars) if o in wanted])
        return [o for o, i in zip(eqn.invars, inner.invars) if i in of]
    if (scan := as_scan(eqn)) is not None:
        _, of = _carried(scan, [o in wanted for o in eqn.outvars])
        return [o for o, i in zip(eqn.invars, scan.jaxpr.invars) if i in of]
    return eqn.invars


def _carried(scan: Scan, outputs: Sequence[bool]) -> tuple[list[bool], set]:
    """What of a scan's carry is needed for the outputs that are wanted and for its marks, and the
    variables of its body that are.
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
    """Evaluates what is wanted of a jaxpr, and returns its values; adds what is marked to `found`.

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
    """The results of a call, whose body runs in its place; None for those that are not wanted."""
    inner, consts = (
        (called.jaxpr, called.consts) if isinstance(called, ClosedJaxpr) else (called, ())
    )
    of = _wanted(inner, [i for i, o in zip(inner.outvars, eqn.outvars) if o in wanted])
    values = _run(inner, consts, operands, of, measure, found)
    return _outputs(inner, values)


def _scanned(
    scan: Scan, eqn: JaxprEqn, operands, wanted: set, measure: Callable, found: Found
) -> list:
    """The results of a loop, of which what is not wanted is left out."""
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
    """The results of a conditional; what the branches that are not taken mark is NaN."""
    index, *arguments = operands
    branches = [_branch(b, measure) for b in eqn.params["branches"]]
    shapes = [jax.eval_shape(branch, *arguments)[1] for branch in branches]
    keys = [[key for key, _ in marked] for marked in (branch.found for branch in branches)]

    def filled(number: int):
        def call(*arguments):
            results, own = branches[number](*arguments)
            absent = [[jnp.full(s.shape, jnp.nan, s.dtype) for s in of] for of in shapes]
            absent[number] = own
            return results, absent

        return call

    results, measured = jax.lax.switch(index, [filled(n) for n in range(len(branches))], *arguments)
    found += [pair for of, xs in zip(keys, measured) for pair in zip(of, xs)]
    return results


class _branch:
    """A branch as a function that also returns what it marks; `found` are the keys of that."""

    def __init__(self, closed: ClosedJaxpr, measure: Callable):
        self._closed, self._measure, self.found = closed, measure, []

    def __call__(self, *arguments):
        inner, here = self._closed.jaxpr, []
        of = _wanted(inner, inner.outvars)
        values = _run(inner, self._closed.consts, arguments, of, self._measure, here)
        self.found = here
        return _outputs(inner, values), [x for _, x in here]


def _outputs(jaxpr: Jaxpr, values: dict) -> list:
    return [v.val if isinstance(v, Literal) else values.get(v) for v in jaxpr.outvars]


def _refuse_effects(eqn: JaxprEqn) -> None:
    """Raises StepError for a callback that would be made twice: in the step, and beside it."""
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
