"""A block's forward as operations of one graph, operations inside loops and `jax.shard_map` that
hold tags included.

A value that a loop makes stands for the values of all iterations. If an iteration reads a value of
the iteration before, the graph has a cycle, which solvers do not accept: `mark` and `cycles` remove
it without a change to the values that are demanded.

A `jax.shard_map` is a loop whose iterations are devices. Values inside have the shape of one
device's part, and exist once for each device that divides the batch. A value inside therefore
counts the bytes of one device times the number of devices, as a value outside does. All bytes of a
block are then bytes before a mesh divides them, and one division at the end is right for all.
`jax.checkpoint` asks its policy inside a `jax.shard_map` too, and returns each device's part of the
saved tensors.
"""

import dataclasses
import graphlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxmem._core.lists import reached
from jaxmem._cost.blocks.segments import BlockGraph, weight_of
from jaxmem._model.tags.named import holds_tag, is_tag
from jaxmem._trace.jaxpr import JaxprEqn, Literal, as_scan, matmul_flops, subjaxprs
from jaxmem._trace.rewrite import flatten
from jaxmem._trace.vary import mapped_axes


@dataclasses.dataclass(frozen=True)
class Value:
    """A value inside a loop. A `jax.shard_map` is a loop whose iterations are the devices.

    number: the number of the value.
    loops: the numbers of the loops in whose iterations the value differs.
    """

    number: int
    loops: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a block's forward: an equation of the block, or one of a loop in it.

    primitive: JAX's name of the operation. A "turn" passes a carried value from one iteration of a
      loop to the next; a "stack" is a result of a loop or of a `jax.shard_map`.
    reads, outputs: numbers of values: the numbers of the block's flat jaxpr, and further numbers
      for values inside loops.
    whole: the index in `BlockGraph.equations` of the equation that the operation is, or is part of.
    share: the operation's part of the time of that equation.
    flops, matmuls: FLOPs and number of matrix products, over all iterations.
    eqn: JAX's equation; None for a "turn", a "stack", and joined operations.
    turns: the number of tensors of the equation's shape that the operation makes.
    in_loop: whether the operation is inside a loop.
    devices: the number of devices that each make such tensors, among the devices that divide the
      block's tensors.
    """

    primitive: str
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    whole: int
    share: float = 1.0
    flops: float = 0.0
    matmuls: int = 0
    eqn: JaxprEqn | None = None
    turns: int = 1
    in_loop: bool = False
    devices: int = 1

    @property
    def tag(self) -> JaxprEqn | None:
        """The equation, where it is a tag."""
        return self.eqn if self.eqn is not None and is_tag(self.eqn) else None

    @property
    def params(self) -> Mapping[str, Any]:
        """The equation's parameters."""
        return {} if self.eqn is None else self.eqn.params

    @property
    def aval(self) -> Any:
        """Shape and dtype of one tensor of the first result."""
        return None if self.eqn is None else self.eqn.outvars[0].aval


class Builder:
    """Collects the operations of a graph.

    closed: indices of the loops that stay one operation.
    size_of: returns the bytes of a value.
    axes: size by name of the mesh axes that divide the block's tensors.
    again: by index of a "turn" operation, the value that the iteration before made.
    """

    def __init__(
        self,
        graph: BlockGraph,
        closed: set[int],
        size_of: Callable[[Any], int],
        axes: Mapping[str, int],
    ):
        avals = graph.instance.flat.avals
        self.needed, self._size_of, self._axes = graph.needed, size_of, axes
        self.sizes = {v: size_of(aval) for v, aval in enumerate(avals)}
        self.operations: list[Operation] = []
        self.again: dict[int, int] = {}
        self.constants: set[int] = set()
        self._lengths: list[int] = []
        self._mapped: dict[int, int] = {}  # by number of a `shard_map`: the devices that run it
        self._scans = 0  # loops round the operation that is being added
        for i, e in enumerate(graph.equations):
            self.sizes |= zip(e.outputs, self._results(e.eqn))
            if i not in closed and _opens(e.eqn):
                start = len(self.operations)
                operands = [v if isinstance(v, Literal) else Value(v) for v in e.inputs]
                self._open(e.eqn, operands, e.outputs, frozenset(), 1, i)
                self._share(start)
                continue
            flops, matmuls = matmul_flops(e.eqn)
            name = e.eqn.primitive.name
            self._add(Operation(name, e.reads, e.outputs, i, 1.0, flops, matmuls, e.eqn))

    def _add(self, operation: Operation) -> int:
        """Adds an operation, and returns its number."""
        self.operations.append(operation)
        return len(self.operations) - 1

    def _new(self, size: int, loops: Iterable[int]) -> Value:
        """A value of `size` bytes in each iteration of the loops."""
        number = len(self.sizes)
        self.sizes[number] = size * self._turns(loops)
        return Value(number, frozenset(loops))

    def _results(self, eqn: JaxprEqn) -> list[int]:
        """Bytes of the results of an equation. Devices may return equal parts from a `shard_map`;
        each device stores its part.
        """
        if (axes := mapped_axes(eqn)) is None:
            return [self._size_of(v.aval) for v in eqn.outvars]
        return [self._devices(axes) * self._size_of(v.aval) for v in eqn.params["jaxpr"].outvars]

    def _turns(self, loops: Iterable[int]) -> int:
        """The number of times that the body of nested loops runs."""
        return math.prod(self._lengths[k] for k in loops)

    def tag_bytes(self, eqn: JaxprEqn) -> Counter[str]:
        """Bytes of the tags inside an equation, by name. Branches share theirs."""
        if is_tag(eqn):
            return Counter({eqn.params["name"]: self._size_of(eqn.outvars[0].aval)})
        found: Counter[str] = Counter()
        for inner in subjaxprs(eqn):
            sizes = sum((self.tag_bytes(e) for e in inner.eqns), Counter())
            found = found | sizes if eqn.primitive.name == "cond" else found + sizes
        scan, axes = as_scan(eqn), mapped_axes(eqn)
        times = scan.length if scan else 1 if axes is None else self._devices(axes)
        return Counter({name: times * size for name, size in found.items()})

    def _devices(self, axes: Collection[str]) -> int:
        """The number of devices over which a `jax.shard_map` along these axes divides its
        arguments.
        """
        return math.prod(n for axis, n in self._axes.items() if axis in axes)

    def _open(self, eqn, operands, outputs, loops: frozenset[int], trips: int, whole: int) -> None:
        """Adds the operations of a loop or of a `jax.shard_map`.

        operands: its values and literals; `outputs`: numbers of its results.
        loops, trips: the loops round it, and the product of their trip counts.
        whole: the index of the equation of the graph that it is in.
        """
        this, axes = len(self._lengths), mapped_axes(eqn)
        within = lambda v: v if isinstance(v, Literal) else Value(v.number, v.loops | {this})
        if axes is not None:
            self._lengths.append(self._devices(axes))
            self._mapped[this] = math.prod(axes.values())
            made = self._body(eqn.params["jaxpr"], [within(v) for v in operands], trips, whole)
            self._return(outputs, made, whole)
            return
        scan = as_scan(eqn)
        assert scan is not None
        self._lengths.append(scan.length)
        trips *= scan.length
        first, stop = scan.consts, scan.consts + scan.carry
        carried, turns = [], []
        for k in range(first, stop):
            init = operands[k]
            # A carried value may differ in every iteration, and depend on every input of the body.
            size = self._size_of(scan.jaxpr.invars[k].aval)
            value = self._new(size, loops | {this} | _loops(operands))
            reads = () if isinstance(init, Literal) else (init.number,)
            turns.append(self._add(Operation("turn", reads, (value.number,), whole, 0.0)))
            carried.append(value)
        sliced = [within(v) for v in operands[stop:]]
        self._scans += 1
        made = self._body(eqn.params["jaxpr"], [*operands[:first], *carried, *sliced], trips, whole)
        self._scans -= 1
        for index, value in zip(turns, made):
            if not isinstance(value, Literal):
                self.again[index] = value.number
        self._return(outputs, made, whole)

    def _return(self, outputs: Sequence[int], made: Sequence, whole: int) -> None:
        """Adds a "stack" operation for each result of a loop's body, which becomes a result of the
        loop's equation.
        """
        for number, value in zip(outputs, made):
            reads = () if isinstance(value, Literal) else (value.number,)
            self._add(Operation("stack", reads, (number,), whole, 0.0))

    def _body(self, jaxpr, arguments, trips: int, whole: int) -> list:
        """Adds the operations of a jaxpr that runs `trips` times; returns its outputs."""
        inner = flatten(jaxpr)
        env = dict(zip(inner.inputs, arguments))
        for v in inner.constants:
            env[v] = self._new(self._size_of(inner.avals[v]), ())
            self.constants.add(env[v].number)
        read = lambda v: v if isinstance(v, Literal) else env[v]
        for node in inner.nodes:
            operands = [read(v) for v in node.inputs]
            loops = _loops(operands)
            results = [self._new(size, loops) for size in self._results(node.eqn)]
            add = self._open if _opens(node.eqn) else self._add_equation
            add(node.eqn, operands, tuple(v.number for v in results), loops, trips, whole)
            env.update(zip(node.outputs, results))
        return [read(v) for v in inner.outputs]

    def _add_equation(self, eqn, operands, outputs, loops, trips, whole) -> None:
        """Adds an equation inside loops as one operation, with the work of all iterations."""
        flops, matmuls = matmul_flops(eqn)
        # Its weight in the loop's time, until `_share` divides by the weight of the whole loop.
        weight = trips * weight_of(eqn)
        mapped = loops & self._mapped.keys()
        turns, devices = self._turns(loops - mapped), self._turns(mapped)
        reads = tuple(v.number for v in operands if not isinstance(v, Literal))
        flops *= trips * math.prod(self._mapped[k] for k in mapped)
        counts, name, in_loop = (flops, trips * matmuls), eqn.primitive.name, self._scans > 0
        self._add(
            Operation(name, reads, outputs, whole, weight, *counts, eqn, turns, in_loop, devices)
        )

    def prune(self) -> None:
        """Removes the operations inside loops that no value of the backward depends on."""
        made = self._made()
        live = reached(_makers(made, self.needed), lambda k: _makers(made, self._reads(k)))
        index = {k: i for i, k in enumerate(sorted(live))}
        self.operations = [self.operations[k] for k in index]
        self.again = {index[k]: v for k, v in self.again.items() if k in live}

    def mark(self) -> list[int]:
        """Cuts the cycles of "turn" operations that the backward needs under every plan, and
        returns further values that the backward needs instead.

        If no choice spares a carried value, the loop need not demand the value: the backward
        demands it directly.
        """
        made = self._made()
        reads = lambda k: () if self.operations[k].tag else self._reads(k)
        always = reached(_makers(made, self.needed), lambda k: _makers(made, reads(k)))
        marks = []
        for k in [k for k, v in self.again.items() if made.get(v) in always]:
            number = len(self.sizes)
            self.sizes[number] = 0
            marks.append(number)
            whole = self.operations[k].whole
            self._add(Operation("turn", (self.again.pop(k),), (number,), whole, 0.0))
        return marks

    def cycles(self) -> list[frozenset[int]]:
        """Sets of indices of operations that depend on each other."""
        made = self._made()
        before = {k: _makers(made, self._reads(k)) for k in range(len(self.operations))}
        after: dict[int, set[int]] = {k: set() for k in before}
        for k, makers in before.items():
            for m in makers:
                after[m].add(k)
        on_from = lambda k, edges: frozenset(reached(edges[k], edges.__getitem__))
        found = {on_from(k, after) & on_from(k, before) for k in self.again}
        return sorted((c for c in found if c), key=min)

    def ordered(self, cycles: Sequence[frozenset[int]]) -> list[Operation]:
        """The operations in topological order. The operations of a cycle are joined, since a value
        that demands one of them demands all of them.
        """
        if not self._lengths:  # nothing was opened
            return self.operations
        group = {k: min(c) for c in cycles for k in c}
        parts: dict[int, list[int]] = {}
        for k in range(len(self.operations)):
            parts.setdefault(group.get(k, k), []).append(k)
        of_value = {v: group.get(k, k) for v, k in self._made().items()}
        before = {
            head: {of_value[v] for k in part for v in self._reads(k) if v in of_value} - {head}
            for head, part in parts.items()
        }
        order = graphlib.TopologicalSorter(before).static_order()
        return [self._joined(parts[head]) for head in order]

    def _joined(self, part: Sequence[int]) -> Operation:
        """Operations as one."""
        if len(part) == 1:
            (k,) = part
            return dataclasses.replace(self.operations[k], reads=tuple(self._reads(k)))
        several = [self.operations[k] for k in part]
        outputs = tuple(v for o in several for v in o.outputs)
        reads = tuple(dict.fromkeys(v for k in part for v in self._reads(k) if v not in outputs))
        total = lambda what: sum(getattr(o, what) for o in several)
        sums = total("share"), total("flops"), total("matmuls")
        return Operation("turns", reads, outputs, several[0].whole, *sums)

    def _made(self) -> dict[int, int]:
        """By number of a value, the index of the operation that makes it."""
        return {v: k for k, o in enumerate(self.operations) for v in o.outputs}

    def _reads(self, k: int) -> list[int]:
        """The values that operation `k` reads, in this iteration and from the iteration before."""
        own = [*self.operations[k].reads]
        return [*own, self.again[k]] if k in self.again else own

    def _share(self, start: int) -> None:
        """Divides the weights of the operations from `start` on by their sum."""
        total = sum(o.share for o in self.operations[start:]) or 1.0
        for k in range(start, len(self.operations)):
            o = self.operations[k]
            self.operations[k] = dataclasses.replace(o, share=o.share / total)


def _loops(values: Iterable) -> frozenset[int]:
    """The loops in whose iterations any of the values differs."""
    return frozenset().union(*(v.loops for v in values if not isinstance(v, Literal)))


def _opens(eqn: JaxprEqn) -> bool:
    """Whether the equation is a loop or a `jax.shard_map` with a tag that its own forward runs."""
    return eqn.primitive.name in ("scan", "shard_map") and holds_tag(eqn)


def _makers(made: Mapping[int, int], values: Iterable[int]) -> set[int]:
    """The indices of the operations that make the values."""
    return {made[v] for v in values if v in made}
