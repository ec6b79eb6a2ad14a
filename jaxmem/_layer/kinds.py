"""What a value is, told from how it was made and what reads it: the kind that decides its codec."""

from jaxmem._jax.primitives import VIEWS
from jaxmem._layer.graph import SOFTMAX, Graph, is_costly

# Operations that hand a value on to an attention: views, slices, and what rotates or scales it.
_HANDED = VIEWS | {"split", "concatenate", "mul", "add", "sub", "neg", "select_n", "div"}
_FARTHEST = 6  # operations between a projection and the batched product of its attention
_CURVED = {"tanh", "erf", "erfc", "logistic", "custom_jvp_call", "max", "exp"}


def kind_of(graph: Graph, value: int) -> str:
    """One of `jaxmem.codecs.KINDS`."""
    if value not in graph.maker:  # an input, or what the function closes over
        return "residual"
    if not graph.inexact(value):
        return "mask"
    made = _between(graph, value)
    if graph.maker[value].primitive == SOFTMAX or SOFTMAX in made:
        return "softmax"
    if made & {"rsqrt", "sqrt"}:
        return "norm"
    if made & _CURVED:
        return "gelu"
    if graph.joins(value):
        return "residual"
    return kind_of_product(graph, value)


def kind_of_product(graph: Graph, value: int) -> str:
    """ "qkv" for what an attention multiplies, else "linear"."""
    return "qkv" if _attended(graph, value, _FARTHEST) else "linear"


def _attended(graph: Graph, value: int, depth: int) -> bool:
    """Whether a matrix product with batch dimensions reads the value, past what hands it on."""
    for node in graph.used_by(value):
        if node.primitive == "dot_general" and node.eqn.params["dimension_numbers"][1][0]:
            return True
        handed = depth > 0 and node.call is None and node.primitive in _HANDED
        if handed and any(_attended(graph, v, depth - 1) for v in node.outputs):
            return True
    return False


def _between(graph: Graph, value: int) -> set[str]:
    """The operations since the last products and residual joins, along what depends on
    activations.
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
        if node.primitive == SOFTMAX:
            found.add(SOFTMAX)
        elif not is_costly(node) and (v == value or not graph.joins(v)):
            found.add(node.primitive)
            todo += [r for r in node.reads if r in graph.live]
    return found
