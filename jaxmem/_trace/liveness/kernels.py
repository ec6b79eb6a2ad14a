"""Groups the equations of a traced program into kernels, as XLA fuses them. Only values that one
kernel makes and another kernel reads are written to memory.

XLA fuses a pointwise operation into every kernel that reads its result. If that would repeat a
costly operation, such as an exponential, XLA writes the result instead, unless the kernels that
read it can be one kernel. Matrix products, loops and unknown operations are kernels of their own,
and read their operands from memory.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxmem._core.lists import reached
from jaxmem._trace.arguments import on_host
from jaxmem._trace.jaxpr import Scan, as_loop
from jaxmem._trace.primitives import IN_PLACE, POINTWISE, POINTWISE_DEAR, REDUCTIONS, REMAT, RENAMED
from jaxmem._trace.rewrite import Program, flatten

BARRIERS = REMAT | {"optimization_barrier"}
SLICED = "sliced"  # the slice that one iteration reads; the loop's body has no equation for it


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Operations that XLA runs as one.

    primitive: JAX's name of the operation that makes the results.
    eqn: JAX's equation of that operation; None for `SLICED`.
    reads: the values that the kernel reads from memory, in order.
    writes: the values that the kernel writes. A renamed value has the number of its origin.
    overwrites: operands whose buffer the result may reuse if no later kernel reads them.
    """

    primitive: str
    eqn: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: frozenset[int] = frozenset()

    @functools.cached_property
    def loop(self) -> Scan | None:
        """The loop that the kernel is; None for any other kernel."""
        return None if self.eqn is None else as_loop(self.eqn)

    @functools.cached_property
    def stacked_twice(self) -> set[int]:
        """Positions of the results that a loop stacks twice, or that are equal in every iteration:
        XLA keeps one stack, or none.
        """
        if (loop := self.loop) is None:
            return set()
        flat, origin = flatten(loop.jaxpr), {}
        for e in flat.nodes:
            if e.eqn.primitive.name in RENAMED and len(e.reads) == len(e.inputs) == len(e.outputs):
                origin.update((o, origin.get(v, v)) for v, o in zip(e.reads, e.outputs))
        seen, found = set(flat.inputs[: loop.consts]), set()
        for position, v in enumerate(flat.outputs):
            if position >= loop.carry and isinstance(v, int):
                first = origin.get(v, v)
                if first in seen:
                    found.add(position)
                seen.add(first)
        return found


@dataclasses.dataclass(frozen=True)
class Body:
    """A program as kernels.

    kernels: the kernels in the program's own order.
    avals: the shape and dtype of each value.
    inputs: the program's inputs and constants.
    outputs: for each output the number of its origin; None for a literal.
    """

    kernels: tuple[Kernel, ...]
    avals: Sequence[Any]
    inputs: frozenset[int]
    outputs: tuple[int | None, ...]


def device_bytes(aval) -> int:
    """Bytes of a value in device memory; 0 for a value in host memory, and for a value that is no
    array.
    """
    if not hasattr(aval, "shape") or on_host(aval):
        return 0
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


def kernels_of(flat: Program, sliced: int, on_gpu: bool) -> Body:
    """Fuses a program.

    flat: the program.
    sliced: the number of its last inputs that are slices, where the program is a loop's body.
    on_gpu: whether XLA:GPU compiles it. XLA:CPU makes random bits by a loop, and has no kernels of
      several results. It writes a value that has many readers, instead of the value's operands.
    """
    nodes, avals, outputs = _nodes(flat, sliced)
    inputs = frozenset(flat.inputs) | frozenset(flat.constants)
    fusion = _Fusion(nodes, avals, outputs, on_gpu)
    return Body(tuple(fusion.kernels()), avals, inputs, outputs)


def _nodes(flat: Program, sliced: int) -> tuple[list[Kernel], list, tuple[int | None, ...]]:
    """The equations that lead to an output, with the avals of values and the program's outputs."""
    avals, nodes = list(flat.avals), []
    origin: dict[int, int] = {}
    # A barrier's outputs keep the memory of its inputs, and are read after all inputs exist. So
    # their readers also read a value without bytes, which the barrier makes.
    behind: dict[int, int] = {}

    def of(v: int) -> int:
        return origin.get(v, v)

    for v in flat.inputs[len(flat.inputs) - sliced :]:
        avals.append(avals[v])
        origin[v] = len(avals) - 1
        nodes.append(Kernel(SLICED, None, (v,), (origin[v],)))
    for e in flat.nodes:
        name, read = e.eqn.primitive.name, e.reads
        pairs = list(zip(read, e.outputs))
        barriers = [behind[v] for v in read if v in behind]
        reads = tuple(dict.fromkeys((*map(of, read), *barriers)))
        alike = len(read) == len(e.inputs) == len(e.outputs)
        if name in BARRIERS and alike:
            avals.append(None)
            nodes.append(Kernel(name, e.eqn, reads, (len(avals) - 1,)))
            behind.update(dict.fromkeys(e.outputs, len(avals) - 1))
            origin.update((o, of(v)) for v, o in pairs)
        elif name in RENAMED and alike:
            origin.update((o, of(v)) for v, o in pairs)
            behind.update((o, behind[v]) for v, o in pairs if v in behind)
        else:
            nodes.append(Kernel(name, e.eqn, reads, e.outputs))
    outputs = tuple(of(v) if isinstance(v, int) else None for v in flat.outputs)
    wanted, live = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.writes):
            wanted.update(node.reads)
            live.append(node)
    return live[::-1], avals, outputs


class _Fusion:
    """Decides which nodes write their results. Nodes go by their position."""

    def __init__(self, nodes: Sequence[Kernel], avals, outputs, on_gpu: bool):
        self.nodes, self.avals, self.on_gpu = nodes, avals, on_gpu
        self.made_by = {v: i for i, n in enumerate(nodes) for v in n.writes}
        self.readers: list[list[int]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            for v in node.reads:
                if (j := self.made_by.get(v)) is not None:
                    self.readers[j].append(i)
        fused = POINTWISE | POINTWISE_DEAR | {SLICED}
        if not on_gpu:
            fused -= {"random_bits", "threefry2x32"}
        self.pointwise = [n.primitive in fused for n in nodes]
        self.reduces = [n.primitive in REDUCTIONS for n in nodes]
        made = set(outputs)
        self.written = [
            not self.pointwise[i]
            or not made.isdisjoint(n.writes)
            or any(not (self.pointwise[r] or self.reduces[r]) for r in self.readers[i])
            for i, n in enumerate(nodes)
        ]
        dear = self._write_what_is_dear()
        if on_gpu:  # XLA:CPU makes no kernel of several results
            self._merge_siblings(dear)

    def _write_what_is_dear(self) -> list[int]:
        """Marks results as written that several kernels would otherwise compute again, and returns
        the costly ones.
        """
        kernels = self._kernels_that_run()
        dear = [False] * len(self.nodes)  # whether a reader that runs the node repeats costly work
        read: list[frozenset[int]] = [frozenset()] * len(self.nodes)  # values read from memory
        found = []
        for i, node in enumerate(self.nodes):
            if self.written[i]:
                continue
            made = {v: j for v in node.reads if (j := self.made_by.get(v)) is not None}
            unwritten = [j for j in made.values() if not self.written[j]]
            read[i] = frozenset(v for v in node.reads if v not in made or self.written[made[v]])
            read[i] = read[i].union(*(read[j] for j in unwritten))
            dear[i] = node.primitive in POINTWISE_DEAR or any(dear[j] for j in unwritten)
            count = len(kernels[i])
            if count < 2 or len(set(self.readers[i])) < 2:
                continue
            # A written value is written once and read by each reader. If the value is not written,
            # each reader reads the value's operands.
            own = sum(device_bytes(self.avals[v]) for v in node.writes)
            traffic = (count - 1) * sum(device_bytes(self.avals[v]) for v in read[i])
            if dear[i] or (not self.on_gpu and traffic > (count + 1) * own):
                self.written[i] = True
                found += [i] if dear[i] else []
        return found

    def _kernels_that_run(self) -> list[frozenset[int]]:
        """By node: the written nodes whose kernels run it."""
        found: list[frozenset[int]] = [frozenset()] * len(self.nodes)
        for i in range(len(self.nodes) - 1, -1, -1):
            found[i] = frozenset((i,)) if self.written[i] else self._kernels_of_readers(i, found)
        return found

    def _kernels_of_readers(self, i: int, found: Sequence[frozenset[int]]) -> frozenset[int]:
        """The written nodes whose kernels run the readers of node `i`."""
        return frozenset().union(*(found[r] for r in self.readers[i]))

    def _merge_siblings(self, dear: Iterable[int]) -> None:
        """Leaves a costly result unwritten if all kernels that read it can be one kernel: all are
        pointwise, and none depends on another.
        """
        dear = list(dear)
        if not dear:
            return
        kernels = self._kernels_that_run()
        # By node, as the bits of a number: the nodes before it that it waits for.
        before = [0] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            for v in node.reads:
                if (j := self.made_by.get(v)) is not None:
                    before[i] |= before[j] | 1 << j
        for i in dear:
            group = self._kernels_of_readers(i, kernels)
            bits = sum(1 << k for k in group)
            if all(self.pointwise[k] and not before[k] & bits for k in group):
                self.written[i] = False

    def kernels(self) -> Iterable[Kernel]:
        """The kernels, in order."""
        reads: list[dict[int, None]] = []
        for i, node in enumerate(self.nodes):
            here: dict[int, None] = {}
            for v in node.reads:
                j = self.made_by.get(v)
                here |= {v: None} if j is None or self.written[j] else reads[j]
            reads.append(here)
            if self.written[i]:
                over = frozenset(v for v in here if self._overwrites(i, v))
                yield Kernel(node.primitive, node.eqn, tuple(here), node.writes, over)

    def _overwrites(self, i: int, v: int) -> bool:
        """Whether the result of node `i` may reuse the buffer of `v`."""
        node = self.nodes[i]
        if node.primitive in IN_PLACE:
            return v in node.reads
        if not self.pointwise[i]:
            return False
        # The nodes that read node `i`, directly or through nodes that are not written.
        fused = reached(self.readers[i], lambda r: [] if self.written[r] else self.readers[r])
        if any(self.reduces[r] for r in fused):
            return False  # a reduction in one kernel with it is scheduled unlike a pointwise one
        mine, other = self.avals[node.writes[0]], self.avals[v]
        if other is None or mine.size != other.size or mine.dtype != other.dtype:
            return False
        # A batched product's result has its batch dimensions as one: XLA shares between equal
        # shapes alone.
        maker = self.nodes[self.made_by[v]] if v in self.made_by else None
        if maker is not None and maker.primitive == "dot_general":
            return len(maker.eqn.params["dimension_numbers"][1][0]) < 2
        return True


MOST_PARTIAL_SUMS = 2 * 2**20  # elements of all partial sums of a product, on an H200
LEAST_PARTIAL_BYTES = 2**18  # bytes, below which an estimate is not changed


def partial_sums(product) -> int:
    """Returns the bytes of a product's partial sums, float32; 0 where XLA does not divide it,
    or where they are few.

    XLA:GPU divides a long contraction whose result is too small to occupy the device, and adds the
    parts in a second kernel. The rule is fitted to what jax 0.10.2 and 0.11.2 do for an H200, to a
    factor of 2 in the number of parts. Smaller GPUs get fewer parts.

    product: the `dot_general` equation.
    """
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    shape, result = product.invars[0].aval.shape, math.prod(product.outvars[0].aval.shape)
    length = math.prod(shape[axis] for axis in contracted)
    if batch or not result or not length:
        return 0
    parts = min(math.isqrt(length) // 2, MOST_PARTIAL_SUMS // result)
    found = 4 * result * 2 ** (parts.bit_length() - 1) if parts > 1 else 0
    return found if found >= LEAST_PARTIAL_BYTES else 0
