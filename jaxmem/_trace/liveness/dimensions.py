"""Which dimensions of an operation's operands and results are related: a mesh divides them by the
same axes.

An operation without a rule relates dimensions in one place and of one size, as pointwise operations
do. The alternative, to relate nothing, would end the division at every kernel that jaxmem does not
know.
"""

import itertools
from collections.abc import Iterable

from jaxmem._trace.jaxpr import Literal
from jaxmem._trace.primitives import REDUCTIONS
from jaxmem._trace.rewrite import Node

# The names of related dimensions, by dimension of one array; None for an unrelated dimension.
Names = list[int | None]


def names_of(node: Node, avals) -> list[Names]:
    """The names of the dimensions of an operation's operands, then of its results."""
    shape = lambda v: getattr(v.aval if isinstance(v, Literal) else avals[v], "shape", ())
    given, made = list(map(shape, node.inputs)), list(map(shape, node.outputs))
    rule = _RULES.get(node.primitive) or (_reduced if node.primitive in REDUCTIONS else _alike)
    return rule(node.eqn.params, given, made)


def _unrelated(shapes: Iterable[tuple[int, ...]]) -> list[Names]:
    found: list[Names] = [[None] * len(shape) for shape in shapes]
    return found


def _alike(params, given, made) -> list[Names]:
    """Dimensions in one place and of one size are related. Operations that return what they read,
    such as a barrier, relate each result to one operand.
    """
    if len(given) == len(made) > 1:
        numbers = itertools.count()
        found: list[Names] = [[next(numbers) for _ in shape] for shape in given]
        same = zip(found, given, made)
        results: list[Names] = [[*a] if s == t else [None] * len(t) for a, s, t in same]
        return [*found, *results]
    like = made[0] if made else ()

    def one(shape) -> Names:
        if len(shape) != len(like):
            return [None] * len(shape)
        return [d if size == like[d] else None for d, size in enumerate(shape)]

    return [one(shape) for shape in (*given, *made)]


def _reduced(params, given, made) -> list[Names]:
    left = [d for d in range(len(given[0])) if d not in params["axes"]]
    operand: Names = list(range(len(given[0])))
    return [list(operand) for _ in given] + [list(left) for _ in made]


def _broadcast(params, given, made) -> list[Names]:
    places, into = params["broadcast_dimensions"], made[0]
    operand: Names = [to if size == into[to] else None for to, size in zip(places, given[0])]
    result: Names = list(range(len(into)))
    return [operand, *_unrelated(given[1:]), result]


def _squeezed(params, given, made) -> list[Names]:
    gone = {d % len(given[0]) for d in params["dimensions"]}
    return [list(range(len(given[0]))), [d for d in range(len(given[0])) if d not in gone]]


def _reshaped(params, given, made) -> list[Names]:
    """Groups of dimensions with one product are related by their first dimensions."""
    (old, *others), new = given, made[0]
    first: Names = [None] * len(old)
    second: Names = [None] * len(new)
    i = j = name = 0
    while i < len(old) and j < len(new):
        start, other, left, right = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(old):
                left, i = left * old[i], i + 1
            elif right < left and j < len(new):
                right, j = right * new[j], j + 1
            else:
                return [*_unrelated(given), *_unrelated(made)]
        of = lambda shape, lo, hi: next((d for d in range(lo, hi) if shape[d] != 1), None)
        a, b = of(old, start, i), of(new, other, j)
        if a is not None and b is not None:
            first[a] = second[b] = name
            name += 1
    return [first, *_unrelated(others), second]


def _product(params, given, made) -> list[Names]:
    (contracted, batch) = params["dimension_numbers"]
    left: Names = [None] * len(given[0])
    right: Names = [None] * len(given[1])
    result: Names = []
    for a, b in zip(*batch):
        left[a] = right[b] = len(result)
        result.append(len(result))
    for names, taken in ((left, (*batch[0], *contracted[0])), (right, (*batch[1], *contracted[1]))):
        for d in range(len(names)):
            if d not in taken:
                names[d] = len(result)
                result.append(len(result))
    for n, (a, b) in enumerate(zip(*contracted)):
        left[a] = right[b] = len(result) + n
    return [left, right, *_unrelated(given[2:]), result]


def _gather(params, given, made) -> list[Names]:
    """Slices of an array: whole dimensions of a slice, and rows of indices. Rows of both are
    related where the array has a row for each row of indices: these are its batch dimensions.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batch, of_indices = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    gone = {*numbers.collapsed_slice_dims, *batch}
    kept = [d for d in range(len(given[0])) if d not in gone]
    operand: Names = [None] * len(given[0])
    for d, to in zip(kept, numbers.offset_dims):
        operand[d] = to if sizes[d] == given[0][d] else None
    rows = [d for d in range(len(made[0])) if d not in numbers.offset_dims]
    indices: Names = [*rows, None][: len(given[1])]
    for d, at in zip(batch, of_indices):
        operand[d] = indices[at]
    return [operand, indices, *_unrelated(given[2:]), list(range(len(made[0])))]


def _scatter(params, given, made) -> list[Names]:
    """The derivative of slices: updates are divided as slices are."""
    numbers, base = params["dimension_numbers"], len(given[0])
    batch, of_indices = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    gone = {*numbers.inserted_window_dims, *batch}
    kept = [d for d in range(base) if d not in gone]
    updates: Names = [None] * len(given[2])
    for d, to in zip(kept, numbers.update_window_dims):
        updates[to] = d if given[0][d] == given[2][to] else None
    rows = [d for d in range(len(given[2])) if d not in numbers.update_window_dims]
    indices: Names = [*range(base, base + len(rows)), None][: len(given[1])]
    for d, at in zip(batch, of_indices):
        indices[at] = d
    for d, name in zip(rows, indices):
        updates[d] = name
    return [list(range(base)), indices, updates, list(range(base))]


def _apart(params, given, made) -> list[Names]:
    return [*_unrelated(given), *_unrelated(made)]


_RULES = {
    "broadcast_in_dim": _broadcast,
    "transpose": lambda p, given, made: [[*range(len(given[0]))], [*p["permutation"]]],
    "squeeze": _squeezed,
    "reshape": _reshaped,
    "dot_general": _product,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    **dict.fromkeys(("shard_map", "scan", "while", "cond"), _apart),
}
