"""Cuts a block's forward into segments that can be timed alone, and shares a segment's time among
its equations.

XLA fuses operations, so that the time of an equation by itself means little. A segment holds what
leads to one tag from the tags before it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from jaxmem._cost.blocks.find import Instance
from jaxmem._model.tags.named import is_tag
from jaxmem._trace.jaxpr import JaxprEqn, Literal, is_reference, matmul_flops, nbytes
from jaxmem._trace.job import Job
from jaxmem._trace.primitives import VIEWS
from jaxmem._trace.rewrite import Node, leading_to, made_of, run


@dataclasses.dataclass(frozen=True)
class BlockGraph:
    """The part of a block's forward that the block's backward may need.

    instances: the block equations that have this graph, such as the layers of an unrolled loop.
      Values are numbers of the first one's flat jaxpr.
    equations: the forward's equations that lead to values that the backward reads, in order.
    needed: the values of the forward that the backward reads, inputs included.
    materialized: the needed values that a matrix product or a loop of the backward reads. Such an
      operation reads its operands from memory, so XLA cannot fuse the values into it.
    """

    instances: tuple[Instance, ...]
    equations: tuple[Node, ...]
    needed: tuple[int, ...]
    materialized: frozenset[int]

    @property
    def instance(self) -> Instance:
        """The first block equation."""
        return self.instances[0]

    def joined(self, instance: Instance) -> "BlockGraph":
        """This graph with one more block equation."""
        return dataclasses.replace(self, instances=(*self.instances, instance))

    @functools.cached_property
    def fixed(self) -> frozenset[int]:
        """Values that depend on no input, such as a causal mask. A loop over layers stores such a
        value once, not once for each layer.
        """
        return frozenset(made_of(self.instance.flat.constants, self.equations))


def graph_of(instance: Instance) -> BlockGraph:
    """Reads the part of the forward that a block equation's derivative needs."""
    flat = instance.flat
    forward, backward = flat.nodes[: instance.boundary], flat.nodes[instance.boundary :]
    made = {o for e in forward for o in e.outputs}
    inputs = set(flat.inputs) - instance.cotangents
    readable = {v for v in made | inputs if not is_reference(flat.avals[v])}
    needed = {v for e in backward for v in e.reads if v in readable}
    # A value of the forward may also be returned as a gradient, with no equation between.
    needed |= {v for v in flat.outputs if isinstance(v, int) and v in made}
    # These read operands from memory. Other readers fuse with what makes their operands.
    big = ("dot_general", "conv_general_dilated", "scan", "while", "cond")
    materialized = {
        v for e in backward if e.eqn.primitive.name in big for v in e.reads if v in needed
    }
    # Of the forward, keep what leads to a needed value.
    kept = tuple(leading_to(forward, needed))
    return BlockGraph((instance,), kept, tuple(sorted(needed)), frozenset(materialized))


def partition(graph: BlockGraph) -> list[list[int]]:
    """Returns the segments as lists of indices of equations. Every equation but the tags is in one
    segment.

    The first segments lead to the tags, one for each tag. The others lead to each value that the
    backward needs. An equation that leads to several of these belongs to the first segment.
    """
    made_by = {o: i for i, e in enumerate(graph.equations) for o in e.outputs}
    owner: dict[int, int] = {}
    groups: list[list[int]] = []

    def claim(roots):
        """Makes a segment of the equations that `roots` depend on, up to tags and other
        segments.
        """
        members, todo = [], list(roots)
        while todo:
            i = made_by.get(todo.pop())
            if i is None or i in owner or is_tag(graph.equations[i].eqn):
                continue
            owner[i] = len(groups)
            members.append(i)
            todo += graph.equations[i].reads
        if members:
            groups.append(sorted(members))

    for e in graph.equations:
        if is_tag(e.eqn):
            claim(e.reads)
    for v in graph.needed:
        claim([v])
    return groups


def segments(graph: BlockGraph, axes: Mapping[str, int]) -> Iterator[tuple[Job, dict[int, float]]]:
    """Yields for each segment of a graph the job that times it, and by index of its equations in
    `BlockGraph.equations` their shares of that time. A segment that takes no time, or that XLA
    computes when it compiles, has no job.

    axes: size by name of the mesh axes that divide the step's batch.
    """
    flat = graph.instance.flat
    for members in partition(graph):
        equations = [graph.equations[i] for i in members]
        made = {o for e in equations for o in e.outputs}
        inside = {v for v in made if not is_reference(flat.avals[v])}
        others = [e for i, e in enumerate(graph.equations) if i not in set(members)]
        # Values are written to memory for readers in other segments, and for readers in the
        # backward that need them there; the backward's other readers fuse with this segment
        # (`fused`).
        read_outside = {v for e in others for v in e.reads} | graph.materialized
        outputs = [v for v in sorted(inside) if v in read_outside]
        fused = [v for v in sorted(inside) if v in graph.needed and v not in outputs]
        job = _piece(graph, equations, outputs, axes, fused)
        weights = [
            0.0 if graph.fixed.issuperset(e.outputs) else weight_of(e.eqn) for e in equations
        ]
        # A constant is folded into what reads it, and views take no time: neither can be timed.
        if job.avals and any(weights):
            shares = {i: weight / sum(weights) for i, weight in zip(members, weights)}
            yield job, shares


def forward(graph: BlockGraph, axes: Mapping[str, int]) -> Job:
    """Returns the whole forward of a block that keeps everything its backward needs."""
    outputs = [v for v in graph.needed if v not in graph.fixed]
    return _piece(graph, graph.equations, outputs, axes)


def backward(graph: BlockGraph, axes: Mapping[str, int]) -> Job:
    """Returns the derivative alone, a function of the kept values and of cotangents."""
    flat = graph.instance.flat
    equations = flat.nodes[graph.instance.boundary :]
    made = {o for e in equations for o in e.outputs}
    return _piece(graph, equations, [v for v in flat.outputs if v in made], axes)


def _piece(
    graph: BlockGraph,
    equations: Sequence[Node],
    outputs: Sequence,
    axes: Mapping[str, int],
    fused: Sequence[int] = (),
) -> Job:
    """Returns equations as a function of the values that they read and do not make. The function
    returns the values of `outputs` that they make. The values `fused`, which the backward fuses
    into its own loops, are computed, and reduced instead of written.
    """
    flat = graph.instance.flat
    made = {o for e in equations for o in e.outputs}
    inputs = sorted({v for e in equations for v in e.reads} - made - set(flat.constants))

    def function(*arrays):
        values = run(equations, dict(zip(inputs, arrays)) | flat.constants)
        return [values[v] for v in outputs if v in made], [_reduced(values[v]) for v in fused]

    return Job(function, tuple(flat.avals[v] for v in inputs), axes)


def _reduced(x):
    """The sum of a numeric array, so that all of it is computed and little is written."""
    # bfloat16 is none of NumPy's kinds. What is no number, such as a random key, stays as it is.
    is_number = (hasattr(x, "sum") and x.dtype.kind in "fiubc") or str(x.dtype) == "bfloat16"
    return x.sum() if is_number else x


def weight_of(eqn: JaxprEqn) -> float:
    """A rough time, in bytes of traffic: 100 FLOPs of matrix products count as a byte, which is
    between a CPU's and a GPU's balance.
    """
    if eqn.primitive.name in VIEWS:
        return 0.0
    values = [v for v in eqn.invars if not isinstance(v, Literal)] + [*eqn.outvars]
    return sum(nbytes(v.aval) for v in values) + matmul_flops(eqn)[0] / 100
