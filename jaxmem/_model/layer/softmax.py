"""A softmax as one node: its derivative reads its result, and must read the tagged result."""

import dataclasses

from jaxmem._model.layer.graph import SOFTMAX, LayerGraph, through
from jaxmem._trace.rewrite import Node, Program

# Operations that may be between the sums and the division: views that keep every axis, and views
# that add and drop axes of length 1.
_KEEPS = {"convert_element_type", "copy", "sharding_constraint", "optimization_barrier", "pvary"}
_RESHAPES = {"broadcast_in_dim", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True)
class Softmax:
    """exp(z) / sum exp(z) along `axes`. `program` is the part of the user's program from z to the
    result.

    A call computes the result of the user's operations, bit for bit.
    """

    program: Program
    axes: tuple[int, ...]

    def __call__(self, x) -> list:
        return self.program.run([x])


def with_softmaxes(program: Program) -> Program:
    """Returns `program` with each softmax as one node, however z minus its maximum was computed."""
    graph = LayerGraph(program, ())
    replaced: dict[int, Node] = {}  # by position of the last node of a softmax
    gone: set[int] = set()
    for node in program.nodes:
        found = _softmax(graph, node)
        if found is None:
            continue
        whole = found.program
        *first, last = (graph.order[n.outputs[0]] for n in whole.nodes)
        gone.update(first)
        replaced[last] = dataclasses.replace(
            node, primitive=SOFTMAX, inputs=whole.inputs, outputs=whole.outputs, call=found
        )
    nodes = [replaced.get(i, n) for i, n in enumerate(program.nodes) if i not in gone]
    return dataclasses.replace(program, nodes=tuple(nodes))


def _softmax(graph: LayerGraph, division: Node) -> Softmax | None:
    """Returns the softmax that ends in this division, or None."""
    if division.primitive != "div" or len(division.reads) != 2:
        return None
    top, below = division.reads
    total, views = through(graph, below, lambda node: node.primitive in _KEEPS | _RESHAPES)
    exponential = graph.maker.get(top)
    summing = graph.maker.get(total) if isinstance(total, int) else None
    if summing is None or summing.primitive != "reduce_sum":
        return None
    if exponential is None or exponential.primitive != "exp":
        return None
    summed, casts = through(
        graph, summing.reads[0], lambda node: node.primitive == "convert_element_type"
    )
    axes = tuple(summing.eqn.params["axes"])
    if summed != top or not _meets_its_own_rows(graph, top, axes, [summing, *views[::-1]]):
        return None
    parts = [exponential, *casts, summing, *views]
    position = lambda node: graph.order[node.outputs[0]]
    nodes = [*sorted(parts, key=position), division]
    inside = {v for node in nodes[:-1] for v in node.outputs}
    operand = exponential.reads[0]
    if inside & graph.outputs:
        return None
    if any(user not in nodes for v in inside for user in graph.used_by(v)):
        return None  # something else reads the exponentials, such as a log-sum-exp
    if any(v != operand and v not in inside for node in nodes for v in node.reads):
        return None
    result = division.outputs[0]
    users = graph.used_by(result)
    if len(users) == 1 and users[0].primitive == "convert_element_type":
        narrow = users[0].outputs[0]  # the narrower value is saved
        if result not in graph.outputs and graph.bytes(narrow) <= graph.bytes(result):
            nodes, result = [*nodes, users[0]], narrow
    part = dataclasses.replace(
        graph.program, nodes=tuple(nodes), inputs=(operand,), outputs=(result,)
    )
    return Softmax(part, axes)


def _meets_its_own_rows(
    graph: LayerGraph, top: int, axes: tuple[int, ...], made: list[Node]
) -> bool:
    """Whether each exponential is divided by the sum over `axes` that contains it. `e / e.sum(1)`
    of a square matrix divides by the sums of other rows.

    made: the sum, and the views of the sum that end in the divisor.
    """
    shape = graph.program.avals[top].shape
    # For each axis of the divisor, the axis of the exponentials along which it differs, or None.
    along = [i if n > 1 else None for i, n in enumerate(shape) if i not in axes]
    for node in made[1:]:
        sizes = graph.program.avals[node.outputs[0]].shape
        if node.primitive == "broadcast_in_dim":
            axes_by_position = dict(zip(node.eqn.params["broadcast_dimensions"], along))
            along = [axes_by_position.get(i) for i in range(len(sizes))]
        elif node.primitive in _RESHAPES:
            left = [axis for axis in along if axis is not None]
            if [shape[axis] for axis in left] != [n for n in sizes if n > 1]:
                return False  # axes are merged or divided
            rest = iter(left)
            along = [next(rest) if n > 1 else None for n in sizes]
    return along == [i if n > 1 and i not in axes else None for i, n in enumerate(shape)]
