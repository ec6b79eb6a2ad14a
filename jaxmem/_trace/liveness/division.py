"""How a mesh divides the values of a traced step, and the bytes of the whole values that its
operations need for a while.

The shardings of the arguments and the step's own constraints are known. XLA derives the others, and
so does this file, in a simpler way. Each operation relates dimensions of its operands to dimensions
of its results. Related dimensions are divided by the same axes of the mesh. If two dimensions of an
operation ask for one axis, as the rows of activations and the rows of a fully sharded weight do,
the dimension in more of the operation's arrays gets the axis. The other arrays are whole along this
axis while the operation runs: a gathered weight, or a gradient before it is scattered.

The alternative was to divide every value by the number of devices that divide the batch. Gradients
that each device of a data-parallel step holds whole were then estimated at an eighth on eight
devices, and tensors that tensor parallelism divides at a multiple of their bytes. The bytes of 10
plans for GPUs were off by up to 20 % (`benchmarks/slices.py`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jax.sharding import NamedSharding

from jaxmem._trace.jaxpr import Jaxpr, Literal, as_loop, nbytes, per_device, subjaxprs
from jaxmem._trace.primitives import COSTLY, REDUCTIONS, REMAT, RENAMED
from jaxmem._trace.rewrite import Node, Program

# Axes of the mesh by dimension of one array.
Spec = tuple[frozenset[str], ...]
# The names of related dimensions, by dimension of one array; None for an unrelated dimension.
Names = list[int | None]
# They return their operands under another shape or dtype.
VIEWS = RENAMED | REMAT | {"convert_element_type", "slice", "dynamic_slice"}
PASSES = 4  # over a program, in turns forward and backward
WHOLE: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Division:
    """How a mesh divides the values of one program.

    specs: the axes by number of a value.
    sizes: the sizes of the mesh's axes.
    gathered: bytes of whole activations that an operation needs while it runs, by its results.
    weights: bytes of whole weights, or of their gradients before these are scattered, whichever are
      more. XLA:GPU gathers the weights of a layer early and together, and scatters gradients late
      and together, so that these bytes are alive while most of the program runs.
    relaid: inputs of the program that are gathered along a dimension that is not their first. XLA
      gathers along the first dimension, so that it copies such a stack of weights to another order
      of its dimensions, once for all loops.
    whole: by value that a reshape needs less divided than the value is, since no axis divides a
      dimension of the result: the number of devices that divide it there.
    inside: the divisions of the bodies of a loop or a conditional, by the operation's results.
    """

    specs: Sequence[Spec]
    sizes: Mapping[str, int]
    gathered: Mapping[tuple[int, ...], int]
    weights: int
    relaid: frozenset[int]
    whole: Mapping[int, int]
    inside: Mapping[tuple[int, ...], Sequence["Division"]]

    def parts(self, v: int) -> int:
        """The number of devices that divide a value."""
        return self.whole.get(v) or _parts(self.specs[v], self.sizes)


def divide(
    flat: Program,
    shardings: Sequence[NamedSharding | None],
    flat_of: Callable[[Jaxpr], Program],
) -> Division | None:
    """Divides the values of a step. None if no sharding of its arguments is known.

    shardings: of the program's inputs; None where no sharding is known.
    flat_of: returns the body of a loop or a conditional as a flat program.
    """
    meshes = [s.mesh.shape for s in shardings if s is not None and any(s.spec)]
    if not meshes:
        return None
    sizes = {axis: size for axis, size in meshes[0].items() if size > 1}
    ndims = [len(flat.avals[v].shape) for v in flat.inputs]
    each = zip(shardings, ndims)
    given = [None if s is None else _spec(s.spec, ndim, sizes) for s, ndim in each]
    return _Propagation(flat, sizes, flat_of, given, flat.inputs, fixed=True).division()


def _spec(spec: Iterable, ndim: int, sizes: Mapping[str, int]) -> Spec:
    """The axes of a `PartitionSpec` that divide an array of `ndim` dimensions."""
    several = lambda axes: axes if isinstance(axes, tuple) else (axes,)
    named = [frozenset(a for a in several(axes) if a in sizes) for axes in spec]
    return tuple((named + [WHOLE] * ndim)[:ndim])


def _parts(spec: Spec, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axes in spec for axis in axes)


class _Propagation:
    """The propagation through one program.

    given: the specs of the inputs; None if unknown.
    arguments: the inputs that are the step's arguments, such as weights, and not activations.
    fixed: whether inputs are not divided further.
    """

    def __init__(
        self, flat: Program, sizes, flat_of, given, arguments: Iterable[int], fixed: bool = False
    ):
        self.flat, self.sizes, self.flat_of = flat, sizes, flat_of
        self.specs: list[Spec] = [(WHOLE,) * len(getattr(a, "shape", ())) for a in flat.avals]
        self.specs_of(flat.inputs, given)
        self.fixed = {v for v, s in zip(flat.inputs, given) if s is not None} if fixed else set()
        self.names = [_names(node, flat.avals) for node in flat.nodes]
        self.arguments = self._views(arguments)
        self.inside: dict[tuple[int, ...], list[Division]] = {}
        self.relaid: set[int] = set()

    def specs_of(self, values: Sequence, specs: Sequence[Spec | None]) -> None:
        for v, spec in zip(values, specs):
            if isinstance(v, int) and spec is not None:
                self.specs[v] = spec

    def division(self, wanted: Sequence[Spec | None] = ()) -> Division:
        """Propagates in turns forward and backward.

        wanted: specs of the program's outputs, if its caller knows them.
        """
        for v, spec in zip(self.flat.outputs, wanted):
            self._add(v, spec)
        nodes = list(zip(self.flat.nodes, self.names))
        # Operations that keep dimensions come first, as in XLA: their arrays leave no choice.
        for some in ([one for one in nodes if one[0].primitive not in COSTLY], nodes):
            for turn in range(PASSES):
                before = list(self.specs)
                for node, names in some if turn % 2 == 0 else reversed(some):
                    self._pass(node, names)
                if turn and self.specs == before:
                    break
        inputs, outputs = self.arguments, self._returned()
        gathered: dict[tuple[int, ...], int] = {}
        weights: dict[int, int] = {}
        gradients: dict[int, int] = {}
        relaid = set(self.relaid)
        for node, names in nodes:
            for v, left, size in self._gathered(node, names):
                if v in node.outputs and v in outputs:
                    gradients[v] = size
                elif v in inputs and v not in node.outputs:
                    weights[inputs[v]] = size
                    whole = [d for d, axes in enumerate(self.specs[v]) if axes != left[d]]
                    relaid |= {inputs[v]} if min(whole) > 0 else set()
                else:
                    gathered[node.outputs] = gathered.get(node.outputs, 0) + size
        most = max(sum(weights.values()), sum(gradients.values()))
        return Division(
            self.specs, self.sizes, gathered, most, frozenset(relaid), self._whole(), self.inside
        )

    def _whole(self) -> dict[int, int]:
        """By value that a reshape needs less divided, the number of devices that divide it there."""
        origin: dict[int, int] = {}
        found: dict[int, int] = {}
        for node in self.flat.nodes:
            if node.primitive not in RENAMED or not isinstance(v := node.inputs[0], int):
                continue
            (u, *_), v = node.outputs, origin.get(v, v)
            origin[u] = v
            before, after = (_parts(self.specs[a], self.sizes) for a in (v, u))
            if node.primitive == "reshape" and after < before:
                found[v] = min(after, found.get(v, after))
        return found

    def _views(self, inputs: Iterable[int]) -> dict[int, int]:
        """By value that is one of these inputs under another shape or dtype, that input."""
        found = {v: v for v in inputs}
        for node in self.flat.nodes:
            if node.primitive in VIEWS:
                pairs = zip(node.inputs, node.outputs)
                found |= {u: found[v] for v, u in pairs if isinstance(v, int) and v in found}
        return found

    def _returned(self) -> set[int]:
        """The values that are outputs under another shape or dtype."""
        found = {v for v in self.flat.outputs if isinstance(v, int)}
        for node in reversed(self.flat.nodes):
            if node.primitive in VIEWS:
                pairs = zip(node.inputs, node.outputs)
                found |= {v for v, u in pairs if isinstance(v, int) and u in found}
        return found

    def _pass(self, node: Node, names: list[Names]) -> None:
        """Divides the arrays of one operation as each other."""
        params = node.eqn.params
        if node.primitive == "sharding_constraint":
            sharding, (made,) = params["sharding"], node.outputs
            if isinstance(sharding, NamedSharding):
                self.specs[made] = self._written(sharding.spec, made)
                self.fixed.add(made)
        if node.primitive == "shard_map":
            for v, spec in zip(node.outputs, params["out_specs"]):
                self.specs[v] = self._written(spec, v)
                self.fixed.add(v)
        elif (loop := as_loop(node.eqn)) is not None:
            sliced = node.primitive == "scan"
            self._bodies(node, [loop.jaxpr], loop.consts, loop.carry, sliced)
        elif node.primitive == "cond":
            self._bodies(node, list(subjaxprs(node.eqn)), len(node.inputs) - 1, 0, False)
        else:
            owned = self._owned(node, names)
            for v, of_v in zip((*node.inputs, *node.outputs), names):
                self._add(v, tuple(owned.get(name, WHOLE) for name in of_v))

    def _written(self, spec: Iterable, v: int) -> Spec:
        """The axes of a value whose `PartitionSpec` the program states."""
        return _spec(spec, len(self.specs[v]), self.sizes)

    def _owned(self, node: Node, names: list[Names]) -> dict[int | None, frozenset[str]]:
        """By name of a dimension, the axes that divide it while the operation runs. An axis divides
        one dimension: the dimension that it divides in most of the arrays.
        """
        votes: Counter = Counter()
        for v, of_v in zip((*node.inputs, *node.outputs), names):
            if isinstance(v, int):
                pairs = zip(of_v, self.specs[v])
                votes.update((n, axis) for n, axes in pairs if n is not None for axis in axes)
        owner: dict[str, int] = {}
        for (name, axis), _ in sorted(votes.items(), key=lambda one: (-one[1], one[0])):
            owner.setdefault(axis, name)
        found: dict[int | None, frozenset[str]] = {}
        for axis, name in owner.items():
            found[name] = found.get(name, WHOLE) | {axis}
        return found

    def _add(self, v: int | Literal, spec: Spec | None) -> None:
        """Divides a value further, by axes that do not divide it yet."""
        if not isinstance(v, int) or v in self.fixed or spec is None:
            return
        mine, shape = list(self.specs[v]), getattr(self.flat.avals[v], "shape", ())
        if len(mine) != len(spec):
            return
        used = WHOLE.union(*mine)
        for d, axes in enumerate(spec):
            more = mine[d] | (axes - used)
            if shape[d] % _parts((more,), self.sizes) == 0:
                used, mine[d] = used | more, more
        self.specs[v] = tuple(mine)

    def _bodies(
        self, node: Node, jaxprs: Sequence[Jaxpr], consts: int, carry: int, sliced: bool
    ) -> None:
        """Divides the arrays of a loop, or of a conditional, as its bodies do.

        consts, carry: how many arrays it reads whole, and how many a loop carries.
        sliced: whether the other arrays are stacks.
        """
        read = lambda v: self.specs[v] if isinstance(v, int) else None
        inner = lambda spec: spec[1:] if sliced and spec is not None else spec
        outer = lambda spec: (WHOLE, *spec) if sliced and spec is not None else spec
        found = []
        for jaxpr in jaxprs:
            flat = self.flat_of(jaxpr)
            # The operands of a loop's condition, and a conditional's index, come first.
            operands = node.inputs[len(node.inputs) - len(flat.inputs) :]
            given = [
                read(v) if i < consts + carry else inner(read(v)) for i, v in enumerate(operands)
            ]
            wanted = [read(v) if i < carry else inner(read(v)) for i, v in enumerate(node.outputs)]
            for i in range(carry):
                # A carried value is divided as its initial value, or else as its result.
                given[consts + i] = _more(given[consts + i], wanted[i])
            mine = lambda v: isinstance(v, int) and v in self.arguments
            arguments = [u for v, u in zip(operands, flat.inputs) if mine(v)]
            one = _Propagation(flat, self.sizes, self.flat_of, given, arguments).division(wanted)
            found.append(one)
            of = lambda v, one=one: one.specs[v] if isinstance(v, int) else None
            for i, (v, u) in enumerate(zip(node.outputs, flat.outputs)):
                self._add(v, of(u) if i < carry else outer(of(u)))
            for i, (v, u) in enumerate(zip(operands, flat.inputs)):
                self._add(v, of(u) if i < consts + carry else outer(of(u)))
            relaid = [v for v, u in zip(operands, flat.inputs) if u in one.relaid]
            self.relaid.update(v for v in relaid if isinstance(v, int))
        self.inside[node.outputs] = found

    def _gathered(self, node: Node, names: list[Names]) -> Iterator[tuple[int, Spec, int]]:
        """The arrays that a product needs whole along an axis that divides them: the array, the
        axes that divide it in the product, and its bytes there.
        """
        if node.primitive != "dot_general":
            return
        owned = self._owned(node, names)
        for v, of_v in zip((*node.inputs, *node.outputs), names):
            if isinstance(v, int):
                spec = self.specs[v]
                left = tuple(axes & owned.get(n, WHOLE) for axes, n in zip(spec, of_v))
                if left != spec:
                    whole = nbytes(self.flat.avals[v])
                    yield v, left, per_device(whole, _parts(left, self.sizes))


def _more(mine: Spec | None, other: Spec | None) -> Spec | None:
    """The spec that divides an array; the first, if both do."""
    return other if mine is None or (other is not None and not any(mine)) else mine


def _names(node: Node, avals) -> list[Names]:
    """The names of the dimensions of an operation's operands, then of its results."""
    shape = lambda v: getattr(v.aval if isinstance(v, Literal) else avals[v], "shape", ())
    given, made = list(map(shape, node.inputs)), list(map(shape, node.outputs))
    rule = _RULES.get(node.primitive) or (_reduced if node.primitive in REDUCTIONS else _alike)
    return rule(node.eqn.params, given, made)


def _unrelated(shapes: Iterable[tuple[int, ...]]) -> list[Names]:
    return [[None] * len(shape) for shape in shapes]


def _alike(params, given, made) -> list[Names]:
    """Dimensions in one place and of one size are related. Operations that return what they read,
    such as a barrier, relate each result to one operand.
    """
    if len(given) == len(made) > 1:
        names, found = 0, []
        for shape in given:
            found.append([names + d for d in range(len(shape))])
            names += len(shape)
        same = zip(found, given, made)
        return [*found, *(list(a) if s == t else [None] * len(t) for a, s, t in same)]
    like = made[0] if made else ()

    def one(shape):
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
    operand = [to if size == into[to] else None for to, size in zip(places, given[0])]
    return [operand, *_unrelated(given[1:]), list(range(len(into)))]


def _transposed(params, given, made) -> list[Names]:
    return [list(range(len(given[0]))), list(params["permutation"])]


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
    related where the array has a row for each row of indices.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batch, of_indices = _batches(numbers, "start_indices_batching_dims")
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
    batch, of_indices = _batches(numbers, "scatter_indices_batching_dims")
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


def _batches(numbers, of_indices: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of an array, and of indices, of which each row has a row of the other."""
    return numbers.operand_batching_dims, getattr(numbers, of_indices)


def _apart(params, given, made) -> list[Names]:
    return [*_unrelated(given), *_unrelated(made)]


_RULES = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "squeeze": _squeezed,
    "reshape": _reshaped,
    "dot_general": _product,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    **dict.fromkeys(("shard_map", "scan", "while", "cond"), _apart),
}
