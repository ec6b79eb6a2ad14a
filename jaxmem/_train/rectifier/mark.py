"""Marks the tensors whose outlier channels a codec may separate while a step is traced, and makes
the traced step into a function that returns the marked tensors. The function computes only the
values that the marked tensors depend on: neither the backward nor the update.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jaxmem._core.actions import Choice
from jaxmem._cost.profile.options import codecs_for
from jaxmem._model.tags.policy import Policy
from jaxmem._model.tags.primitive import identity, tag_p
from jaxmem._trace.jaxpr import ClosedJaxpr, Scan, as_scan, call_body, inside
from jaxmem._trace.rewrite import Node, Program, evaluated, flatten
from jaxmem.errors import StepError

# An identity that marks, in the trace, the operation at which a step's forward computes a tensor.
mark_p = identity("jaxmem_outliers")


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
        return _MarkingPolicy(label, layers, self._codecs)


class _MarkingPolicy(Policy):
    """Recomputes every tensor, and marks a tensor in the forward if a codec of the tensor separates
    outliers.

    codecs: the codecs that the user passed to `jaxmem.plan`.
    """

    def __init__(self, block: str, layers: int, codecs: Any):
        super().__init__(block, (), layers)
        self.codecs = codecs

    __hash__ = object.__hash__  # by identity: a policy must be hashable, and `codecs` need not be

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, primitive, *avals, **params):
        if primitive is not tag_p:
            return False
        codecs = codecs_for(params["kind"], params["codec"], avals[0].dtype, self.codecs)
        separates = any(codec.capacity is not None for codec in codecs)
        inexact = jnp.issubdtype(avals[0].dtype, jnp.floating)
        if not (separates and inexact):
            return False
        # Later operations read the mark's result, so that the mark stays in the program.
        return lambda x: mark_p.bind(x, block=self.block, name=params["name"], several=0)


Found = list[tuple[tuple[str, str], Any]]  # (block, name), and the measure of the tensor


def reaped(closed: ClosedJaxpr, measure: Callable) -> Callable[..., Found]:
    """A function of the arguments of `closed` that returns `measure(tensor)` for each marked
    tensor, under its block and name, in the order of the program. Results of a loop's iterations
    are stacked.

    Tensors in the body of a `while` loop, or of a `shard_map`, are left out.
    """
    program = flatten(closed)

    def marks(*arguments) -> Found:
        found: Found = []
        _outputs(program, (), arguments, measure, found)
        return found

    return marks


def _holds(node: Node) -> bool:
    """Whether a node is a mark, or has one in its body in a part that `reaped` searches."""
    enters = lambda eqn: call_body(eqn) is not None or eqn.primitive.name in ("scan", "cond")
    return node.eqn.primitive is mark_p or (
        enters(node.eqn) and any(e.primitive is mark_p for e in inside(node.eqn, enters))
    )


def _wanted(program: Program, outputs: Sequence) -> set[int]:
    """The values of a program that its marks and the given outputs depend on."""
    wanted = {v for v in outputs if isinstance(v, int)}
    for node in reversed(program.nodes):
        if _holds(node) or wanted.intersection(node.outputs):
            wanted.update(_reads(node, wanted))
    return wanted


def _reads(node: Node, wanted: set[int]) -> Sequence[int]:
    """The values that a node's wanted outputs and its marks depend on."""
    if (scan := as_scan(node.eqn)) is None:
        return node.reads
    body = flatten(node.eqn.params["jaxpr"])
    _, of = _carried(scan, body, [v in wanted for v in node.outputs])
    return [v for v, i in zip(node.inputs, body.inputs) if i in of and isinstance(v, int)]


def _carried(scan: Scan, body: Program, outputs: Sequence[bool]) -> tuple[list[bool], set[int]]:
    """Which carried values of a scan its wanted outputs and its marks depend on, and the values of
    its body that are needed.
    """
    carry = list(outputs[: scan.carry])
    stacked = [o for o, w in zip(body.outputs[scan.carry :], outputs[scan.carry :]) if w]
    enters = body.inputs[scan.consts : scan.consts + scan.carry]
    while True:
        of = _wanted(body, [*(o for o, w in zip(body.outputs, carry) if w), *stacked])
        more = [w or i in of for w, i in zip(carry, enters)]
        if more == carry:
            return carry, of
        carry = more


def _outputs(
    program: Program, wanted: Sequence, arguments: Sequence, measure: Callable, found: Found
) -> list:
    """The wanted outputs of a program, from the nodes alone that these outputs and the program's
    marks depend on. Appends the measured marks to `found`.

    Arguments that no such node reads may be None.
    """
    values = _wanted(program, wanted)
    nodes = [n for n in program.nodes if _holds(n) or values.intersection(n.outputs)]

    def results_of(node: Node, operands: Sequence) -> Sequence:
        has_rule = node.primitive == "scan" or _holds(node)
        rule = _RULES.get(node.primitive, _bound) if has_rule else _bound
        with node.eqn.ctx.manager:
            return rule(node, operands, values, measure, found)

    absent = dict.fromkeys(range(len(program.avals)))
    given = dict(zip(program.inputs, arguments))
    return evaluated(wanted, nodes, absent | program.constants | given, results_of)


# Rules, by primitive: each returns the results of a node. `wanted` are the values of the node's
# program that are needed; results that are not wanted are None.


def _marked(node: Node, operands, wanted: set[int], measure: Callable, found: Found) -> Sequence:
    """The rule of a mark: measures its operand, and passes the operand on."""
    params = node.eqn.params
    for _ in range(params["several"]):
        measure = jax.vmap(measure)
    found.append(((params["block"], params["name"]), measure(operands[0])))
    return operands


def _scanned(node: Node, operands, wanted: set[int], measure: Callable, found: Found) -> Sequence:
    """A scan without the carried values and outputs that are not wanted."""
    scan = as_scan(node.eqn)
    assert scan is not None
    body = flatten(node.eqn.params["jaxpr"])
    consts, end = scan.consts, scan.consts + scan.carry
    outputs = [v in wanted for v in node.outputs]
    carry, of = _carried(scan, body, outputs)
    stacks = outputs[scan.carry :]
    returned = [o for o, w in zip(body.outputs, (*carry, *stacks)) if w]
    sliced = [x if v in of else None for x, v in zip(operands[end:], body.inputs[end:])]
    run, marks = _with_marks(body, returned, measure)

    def turn(carried, slices):
        made, own = run(*operands[:consts], *_filled(carry, carried), *slices)
        return made[: sum(carry)], (made[sum(carry) :], own)

    last, (stacked, measured) = jax.lax.scan(
        turn,
        [x for x, w in zip(operands[consts:end], carry) if w],
        sliced,
        length=scan.length,
        reverse=node.eqn.params["reverse"],
    )
    found += list(zip(marks, measured))
    return [*_filled(carry, last), *_filled(stacks, stacked)]


def _branched(node: Node, operands, wanted: set[int], measure: Callable, found: Found) -> Sequence:
    """A conditional. The marks of branches that do not run are NaN."""
    index, *arguments = operands
    programs = map(flatten, node.eqn.params["branches"])
    pairs = [_with_marks(program, program.outputs, measure) for program in programs]
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


def _with_marks(program: Program, wanted: Sequence, measure: Callable) -> tuple[Callable, list]:
    """A function of a program's arguments that returns the wanted outputs and the measured marks,
    and a list that receives the keys of the marks when the function is traced.
    """
    keys: list = []

    def call(*arguments):
        here: Found = []
        results = _outputs(program, wanted, arguments, measure, here)
        keys[:] = [key for key, _ in here]
        return results, [x for _, x in here]

    return call, keys


def _bound(node: Node, operands, wanted: set[int], measure: Callable, found: Found) -> Sequence:
    """Any other node. Raises StepError for a callback that would run twice: in the step, and in the
    counting program.
    """
    if any(e.primitive.name == "io_callback" for e in (node.eqn, *inside(node.eqn))):
        raise StepError(
            "track: the forward calls jax.experimental.io_callback, which counting would call once"
            " more; expected a forward without"
        )
    return node.bind(operands)


_RULES: dict[str, Callable] = {mark_p.name: _marked, "scan": _scanned, "cond": _branched}


def _filled(which: Sequence[bool], values) -> list:
    """The values at the indices where `which` is true, and None at the others."""
    each = iter(values)
    return [next(each) if one else None for one in which]
