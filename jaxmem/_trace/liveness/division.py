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
devices, and tensors that tensor parallelism divides at a multiple of their bytes. The median error
over 20 meshes was 45.8 %, and is 1.9 % (`python -m benchmarks.slices slice_bytes`).
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from jax.sharding import NamedSharding

from jaxmem._trace.jaxpr import Jaxpr, Literal, as_loop, nbytes, per_device, subjaxprs
from jaxmem._trace.liveness.dimensions import Names, names_of
from jaxmem._trace.primitives import COSTLY, REMAT, RENAMED
from jaxmem._trace.rewrite import Node, Program

# Axes of the mesh by dimension of one array.
Spec = tuple[frozenset[str], ...]
# They return their operands under another shape or dtype.
VIEWS = RENAMED | REMAT | {"convert_element_type", "slice", "dynamic_slice"}
# XLA:GPU gathers weights together up to so many bytes (its flag
# `xla_gpu_all_gather_combine_threshold_bytes`). One such group is in use, and the next is gathered.
COMBINED = 30 * 2**20
PASSES = 4  # over a program, in turns forward and backward
WHOLE: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class MeshDivision:
    """How a mesh divides the values of one program.

    specs: the axes by number of a value.
    sizes: the sizes of the mesh's axes.
    gathered: by the results of an operation, the whole activations that it needs, each with its
      number and its bytes. XLA gathers an activation once for all its readers.
    weights: bytes of whole weights, or of their gradients before these are scattered, whichever are
      more. XLA:GPU gathers the weights of a layer early and in groups, and scatters gradients late
      and in groups, so that the bytes of two groups are alive while most of the program runs.
    relaid: inputs of the program that are gathered along a dimension that is not their first. XLA
      gathers along the first dimension, so that it copies such a stack of weights to another order
      of its dimensions, once for all loops.
    inside: the divisions of the bodies of a loop or a conditional, by the operation's results.
    """

    specs: Sequence[Spec]
    sizes: Mapping[str, int]
    gathered: Mapping[tuple[int, ...], Sequence[tuple[int, int]]]
    weights: int
    relaid: frozenset[int]
    inside: Mapping[tuple[int, ...], Sequence["MeshDivision"]]

    def parts(self, v: int) -> int:
        """The number of devices that divide a value."""
        return _parts(self.specs[v], self.sizes)


def divide(
    flat: Program,
    shardings: Sequence[NamedSharding | None],
    flat_of: Callable[[Jaxpr], Program],
) -> MeshDivision | None:
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
        known = {v: spec for v, spec in zip(flat.inputs, given) if spec is not None}
        for v, spec in known.items():
            self.specs[v] = spec
        self.fixed = {*known} if fixed else set()
        self.names = [names_of(node, flat.avals) for node in flat.nodes]
        self.barred = self._barred()
        self.arguments = self._views(arguments)
        self.inside: dict[tuple[int, ...], list[MeshDivision]] = {}
        self.relaid: set[int] = set()
        self.bodies: dict[tuple, MeshDivision] = {}
        self.passed: dict[tuple[int, ...], list[Spec]] = {}  # after the last pass of an operation

    def division(self, wanted: Sequence[Spec | None] = ()) -> MeshDivision:
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
                    values = [v for v in (*node.inputs, *node.outputs) if isinstance(v, int)]
                    of_values = lambda values=values: [self.specs[v] for v in values]
                    if self.passed.get(node.outputs) != of_values():
                        self._pass(node, names)
                        self.passed[node.outputs] = of_values()
                if turn and self.specs == before:
                    break
        inputs, outputs = self.arguments, self._returned()
        gathered: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        same = self._views((v for n in self.flat.nodes for v in n.outputs), RENAMED)
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
                    gathered[node.outputs].append((same.get(v, v), size))
        many = [list(sizes.values()) for sizes in (weights, gradients)]
        most = max(max(min(sum(sizes), 2 * COMBINED), *sizes, 0) for sizes in many)
        return MeshDivision(self.specs, self.sizes, gathered, most, frozenset(relaid), self.inside)

    def _views(self, values: Iterable[int], names: Collection[str] = VIEWS) -> dict[int, int]:
        """By value that operations of these names make of one of `values`, that value."""
        found = {v: v for v in values}
        for node in self.flat.nodes:
            if node.primitive in names:
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

    def _barred(self) -> dict[tuple[int, int], frozenset[str]]:
        """By value and dimension, the axes that cannot divide it, since a reshape relates it to a
        dimension that they do not divide: three concatenated products of heads, for example.
        """
        found: dict[tuple[int, int], frozenset[str]] = {}
        nodes = [one for one in zip(self.flat.nodes, self.names) if one[0].primitive not in COSTLY]
        for node, names in (*nodes, *reversed(nodes)):
            arrays = list(zip((*node.inputs, *node.outputs), names))
            barred: dict[int, frozenset[str]] = {}
            for v, of_v in arrays:
                for d, name in enumerate(of_v):
                    if name is None or not isinstance(v, int):
                        continue
                    more = found.get((v, d), WHOLE)
                    if node.primitive == "reshape":
                        size = self.flat.avals[v].shape[d]
                        more |= {axis for axis, n in self.sizes.items() if size % n}
                    barred[name] = barred.get(name, WHOLE) | more
            for v, of_v in arrays:
                for d, name in enumerate(of_v):
                    if isinstance(v, int) and name is not None and barred[name]:
                        found[v, d] = barred[name]
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
        barred = set()
        for v, of_v in zip((*node.inputs, *node.outputs), names):
            if isinstance(v, int):
                pairs = zip(of_v, self.specs[v])
                votes.update((n, axis) for n, axes in pairs if n is not None for axis in axes)
                each = ((n, self.barred.get((v, d), WHOLE)) for d, n in enumerate(of_v))
                barred.update((n, axis) for n, axes in each for axis in axes)
        owner: dict[str, int] = {}
        for (name, axis), _ in sorted(votes.items(), key=lambda one: (-one[1], one[0])):
            if (name, axis) not in barred:
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
            more = mine[d] | (axes - used - self.barred.get((v, d), WHOLE))
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
                mine, other = given[consts + i], wanted[i]
                if mine is None or (other is not None and not any(mine)):
                    given[consts + i] = other
            mine = lambda v: isinstance(v, int) and v in self.arguments
            arguments = [u for v, u in zip(operands, flat.inputs) if mine(v)]
            key = id(flat), *given, None, *wanted  # most passes change nothing of a loop
            if key not in self.bodies:
                body = _Propagation(flat, self.sizes, self.flat_of, given, arguments)
                self.bodies[key] = body.division(wanted)
            one = self.bodies[key]
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
