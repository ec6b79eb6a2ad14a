"""Marks the tensors whose outlier channels a codec may separate while a step is traced, and makes
the traced step into a function that returns the marked tensors. The function computes only the
values that the marked tensors depend on: neither the backward nor the update.
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
    Flat,
    FlatEquation,
    Jaxpr,
    JaxprEqn,
    Literal,
    Scan,
    as_scan,
    call_body,
    flatten,
    run,
    subjaxprs,
)
from jaxmem._trace.rewrite import equations
from jaxmem.errors import StepError

# An identity that marks, in the trace, the place where a step's forward computes a tensor.
mark_p = Primitive("jaxmem_outliers")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(mark_p, lambda ctx, x, **_: [x])


def _batched(arguments, dims, *, several, **params):
    """The rule for a vmap over a forward that was already separated from its backward. Each example
    is a tensor with codes of its own, unlike the batch axis of a tagged tensor. The examples are
    moved to the first axis.
    """
    x = jnp.moveaxis(arguments[0], dims[0], 0)
    return mark_p.bind(x, several=several + 1, **params), 0


batching.primitive_batchers[mark_p] = _batched


class Marking:
    """A policy source under which every block marks its tensors, and saves none of them. `build`
    receives it in place of a plan.

    codecs: the codecs that the user passed to `jaxmem.plan`.
    """

    def __init__(self, codecs: Any = None):
        self._codecs = codecs

    def choices_for(self, block: str) -> Mapping[str, Choice]:
        return {}

    def groups(self, block: str) -> tuple[tuple[int, int], ...]:
        return ()

    def policy_for(self, label: str, layers: int) -> Policy:
        return _MarkingPolicy(label, (), layers, self._codecs)


@dataclasses.dataclass(frozen=True, eq=False)
class _MarkingPolicy(Policy):
    """Recomputes every tensor, and marks a tensor in the forward if a codec of the tensor separates
    outliers.

    codecs: the codecs that the user passed to `jaxmem.plan`.
    """

    codecs: Any = None

    __hash__ = object.__hash__  # by identity: a policy must be hashable, and `codecs` need not be

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, primitive, *avals, **params):
        if primitive is not tag_p:
            return False
        codecs = codecs_for(params["kind"], params["codec"], avals[0].dtype, self.codecs)
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


Found = list[tuple[tuple[str, str], Any]]  # (block, name) of a mark, and the measure of its tensor


def reaped(closed: ClosedJaxpr, measure: Callable) -> Callable[..., Found]:
    """A function of the arguments of `closed` that returns `measure` of each marked tensor, under
    its block and name, in the order of the program. The measures of a loop's iterations are
    stacked.

    Tensors in the body of a `while` loop, or of a `shard_map`, are left out.
    """
    flat = flatten(closed)
    return lambda *arguments: _evaluated(flat, arguments, [False] * len(flat.outputs), measure)[1]


@functools.cache
def _marks(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has a mark at a place that `reaped` searches."""
    return any(map(_holds, jaxpr.eqns))


def _holds(eqn: JaxprEqn) -> bool:
    """Whether an equation is a mark, or has one in its body."""
    enters = call_body(eqn) is not None or eqn.primitive.name in ("scan", "cond")
    return eqn.primitive is mark_p or (enters and any(map(_marks, subjaxprs(eqn))))


def _needed(flat: Flat, outputs: Sequence[bool]) -> tuple[set[int], list[FlatEquation]]:
    """The values that the marks of a program and some of its outputs depend on, and the equations
    that compute these values.
    """
    values = {v for v in _where(flat.outputs, outputs) if isinstance(v, int)}
    needed = []
    for e in reversed(flat.equations):
        if _holds(e.eqn) or values.intersection(e.outputs):
            needed.append(e)
            values.update(_reads(e, values))
    return values, needed[::-1]


def _reads(e: FlatEquation, values: set[int]) -> Sequence[int]:
    """The inputs of an equation that its marks and its outputs among `values` depend on."""
    if (scan := as_scan(e.eqn)) is None:
        return e.reads
    inner = flatten(e.eqn.params["jaxpr"])
    _, needed = _carried(scan, inner, [v in values for v in e.outputs])
    return [v for v, i in zip(e.inputs, inner.inputs) if i in needed and isinstance(v, int)]


def _carried(scan: Scan, body: Flat, outputs: Sequence[bool]) -> tuple[list[bool], set[int]]:
    """The outputs of a scan's body that the scan's marks and some of its outputs depend on, and the
    needed values of the body. A carried value is needed if the next iteration needs it.
    """
    outputs, enters = list(outputs), body.inputs[scan.consts :][: scan.carry]
    while True:
        values, _ = _needed(body, outputs)
        carry = [w or i in values for w, i in zip(outputs, enters)]
        if carry == outputs[: scan.carry]:
            return outputs, values
        outputs[: scan.carry] = carry


def _evaluated(
    flat: Flat, arguments: Sequence, outputs: Sequence[bool], measure: Callable
) -> tuple[list, Found]:
    """Some outputs of a program, with None in place of the others, and the measured marks.

    arguments: values of the program's inputs; None for an input that is not needed.
    """
    values = flat.constants | dict(zip(flat.inputs, arguments))
    read = lambda v: v.val if isinstance(v, Literal) else values.get(v)
    found: Found = []
    needed, order = _needed(flat, outputs)
    for e in order:
        operands, marks = [read(v) for v in e.inputs], []
        with e.eqn.ctx.manager:
            if e.eqn.primitive is mark_p:
                of_each = measure
                for _ in range(e.eqn.params["several"]):
                    of_each = jax.vmap(of_each)
                marks = [((e.eqn.params["block"], e.eqn.params["name"]), of_each(operands[0]))]
                results: Any = operands
            elif (scan := as_scan(e.eqn)) is not None:
                wanted = [v in needed for v in e.outputs]
                results, marks = _scanned(scan, e.eqn, operands, wanted, measure)
            elif e.eqn.primitive.name == "cond" and _holds(e.eqn):
                results, marks = _branched(e.eqn, operands, measure)
            else:
                _refuse_effects(e.eqn)
                made = run([e], {v: values[v] for v in e.reads})
                results = [made[v] for v in e.outputs]
        values.update(zip(e.outputs, results))
        found += marks
    return [read(v) if w else None for v, w in zip(flat.outputs, outputs)], found


def _scanned(
    scan: Scan, eqn: JaxprEqn, operands: Sequence, outputs: Sequence[bool], measure: Callable
) -> tuple[list, Found]:
    """Some outputs of a scan, and its marks. Only the needed values are carried."""
    body, first = flatten(eqn.params["jaxpr"]), scan.consts + scan.carry
    made, needed = _carried(scan, body, outputs)
    carry, stacked = made[: scan.carry], made[scan.carry :]
    sliced = [x if v in needed else None for x, v in zip(operands[first:], body.inputs[first:])]
    keys: list = []

    def iteration(carried, slices):
        entering = [*operands[: scan.consts], *_spread(carried, carry), *slices]
        results, found = _evaluated(body, entering, made, measure)
        keys[:] = [key for key, _ in found]
        of_each = _where(results[scan.carry :], stacked), [x for _, x in found]
        return _where(results[: scan.carry], carry), of_each

    begin = _where(operands[scan.consts : first], carry)
    how = {"length": scan.length, "reverse": eqn.params["reverse"]}
    last, (rows, measured) = jax.lax.scan(iteration, begin, sliced, **how)
    return [*_spread(last, carry), *_spread(rows, stacked)], list(zip(keys, measured))


def _branched(eqn: JaxprEqn, operands: Sequence, measure: Callable) -> tuple[list, Found]:
    """The outputs of a conditional, and its marks: NaN in branches that do not run."""
    index, *arguments = operands
    flats = [flatten(branch) for branch in eqn.params["branches"]]
    keys: list[list] = [[] for _ in flats]

    def branch(number: int, *arguments):
        flat = flats[number]
        results, found = _evaluated(flat, arguments, [True] * len(flat.outputs), measure)
        keys[number] = [key for key, _ in found]
        return results, [x for _, x in found]

    branches = [functools.partial(branch, number) for number in range(len(flats))]
    shapes = [jax.eval_shape(one, *arguments)[1] for one in branches]

    def filled(number: int, *arguments):
        results, own = branch(number, *arguments)
        absent = [[jnp.full(s.shape, jnp.nan, s.dtype) for s in of] for of in shapes]
        return results, [*absent[:number], own, *absent[number + 1 :]]

    cases = [functools.partial(filled, number) for number in range(len(flats))]
    results, measured = jax.lax.switch(index, cases, *arguments)
    return results, [pair for one, xs in zip(keys, measured) for pair in zip(one, xs)]


def _where(values: Sequence, wanted: Sequence[bool]) -> list:
    """The wanted ones of some values."""
    return [x for x, w in zip(values, wanted, strict=True) if w]


def _spread(values: Sequence, wanted: Sequence[bool]) -> list:
    """The inverse of `_where`, with None in place of the other values."""
    rest = iter(values)
    return [next(rest) if w else None for w in wanted]


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
