"""What a value is, told from how it was made and what reads it: the kind that decides its codec."""

from jaxmem._model.layer.graph import SOFTMAX, LayerGraph, is_costly, through
from jaxmem._trace.primitives import VIEWS
from jaxmem._trace.rewrite import Node

# Operations that hand a value on to an attention: views, slices, and what rotates or scales it.
_HANDED = VIEWS | {"split", "concatenate", "mul", "add", "sub", "neg", "select_n", "div"}
_FARTHEST = 6  # operations between a projection and the batched product of its attention
# Operations that hand scores on to their softmax: what masks, scales, bounds and shapes them.
_SCORED = _HANDED | {"tanh", "max", "min", "copy"}
_CURVED = {"tanh", "erf", "erfc", "logistic", "custom_jvp_call", "max", "exp"}


def kind_of(graph: LayerGraph, value: int) -> str:
    """One of `jaxmem.codecs.KINDS`."""
    if value not in graph.maker:  # an input, or what the function closes over
        return "residual"
    if not graph.inexact(value):
        return "mask"
    made = _between(graph, value)
    if SOFTMAX in made:
        return "softmax"
    if made & {"rsqrt", "sqrt"}:
        return "norm"
    if made & _CURVED:
        return "gelu"
    if graph.joins(value):
        return "residual"
    return kind_of_product(graph, value)


def kind_of_product(graph: LayerGraph, value: int) -> str:
    """ "qkv" for what an attention multiplies, else "linear"."""
    return "qkv" if _attended(graph, value, _FARTHEST) else "linear"


def _attended(graph: LayerGraph, value: int, depth: int) -> bool:
    """Whether a matrix product with batch dimensions reads the value, past what hands it on."""
    for node in graph.used_by(value):
        if is_costly(node) and _is_batched(node):
            return True
        handed = depth > 0 and node.call is None and node.primitive in _HANDED
        if handed and any(_attended(graph, v, depth - 1) for v in node.outputs):
            return True
    return False


def _is_batched(node: Node) -> bool:
    """Whether a node is a matrix product with batch dimensions."""
    return node.primitive == "dot_general" and bool(node.eqn.params["dimension_numbers"][1][0])


def is_score(graph: LayerGraph, product: Node, value: int) -> bool:
    """Whether a result of `product`, or its form `value`, is an attention's scores: a product of
    two activations, with batch dimensions, that a softmax reads.
    """
    of_two = all(v in graph.live for v in product.reads)
    return of_two and _is_batched(product) and _meets_softmax(graph, value, _FARTHEST)


def _meets_softmax(graph: LayerGraph, value: int, depth: int) -> bool:
    for node in graph.used_by(value):
        if node.primitive == SOFTMAX or is_exponential(graph, node):
            return True
        handed = depth > 0 and node.call is None and node.primitive in _SCORED
        if handed and any(_meets_softmax(graph, v, depth - 1) for v in node.outputs):
            return True
    return False


def is_exponential(graph: LayerGraph, node: Node) -> bool:
    """Whether a node is exp(z - max z) of a softmax whose parts do not stand together: its result
    is summed, and its sums may divide what is made of it later, as after an attention's product.
    """
    if node.primitive != "exp" or not node.reads:
        return False
    difference = graph.maker.get(node.reads[0])
    if difference is None or difference.primitive != "sub" or len(difference.reads) != 2:
        return False
    view = lambda n: n.primitive in VIEWS | {"stop_gradient"}
    largest, _ = through(graph, difference.reads[1], view)
    maximum = graph.maker.get(largest) if isinstance(largest, int) else None
    if maximum is None or maximum.primitive not in ("reduce_max", "max"):
        return False
    return _is_summed(graph, node.outputs[0])


def _is_summed(graph: LayerGraph, value: int) -> bool:
    """Whether the values are summed, past views."""
    for node in graph.used_by(value):
        if node.primitive == "reduce_sum":
            return True
        if node.primitive in VIEWS and any(_is_summed(graph, v) for v in node.outputs):
            return True
    return False


def _between(graph: LayerGraph, value: int) -> set[str]:
    """The operations since the last products and residual joins, along what depends on
    activations. A softmax counts as one.
    """
    seen: set[int] = set()
    found: set[str] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        node = graph.maker.get(v)
        if v in seen or node is None:
            continue
        seen.add(v)
        if node.primitive == SOFTMAX or is_exponential(graph, node):
            found.add(SOFTMAX)
        elif not is_costly(node) and (v == value or not graph.joins(v)):
            found.add(node.primitive)
            live = [r for r in node.reads if r in graph.live]
            scales = node.primitive == "dot_general"  # the larger operand, by the smaller one
            todo += [max(live, key=graph.bytes)] if scales else live
    return found
