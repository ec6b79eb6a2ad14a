"""Which values of a layer are worth a decision."""

import dataclasses

from jaxmem._model.codecs.registry import EXACT
from jaxmem._model.layer.graph import SOFTMAX, LayerGraph, is_costly
from jaxmem._model.layer.kinds import is_score, kind_of, kind_of_product
from jaxmem._model.layer.rules import DerivativeRule
from jaxmem._model.tags.tag import name_p, tag_p
from jaxmem._trace.primitives import POINTWISE_LINEAR, VIEWS

SMALLEST = 1 / 64  # of the largest activation: what is smaller is not worth a variable
SCORES = "scores"  # the role of an attention's scores
MOST = 24  # a layer: more make the program slower, and the table longer, than they save


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A value that gets a tag.

    value: its number.
    kind: what it is, of `jaxmem.codecs.KINDS`.
    why: why it was picked.
    path: the modules and functions that it belongs to.
    role: what the value is to the layer, where that says more than the kind; the name ends in it.
    named: results of the user's `checkpoint_name`s whose place and name the tag takes.
    name: the tag's.
    """

    value: int
    kind: str
    why: str
    path: tuple[str, ...] = ()
    role: str = ""
    named: tuple[int, ...] = ()
    name: str = ""


def candidates(graph: LayerGraph) -> list[Candidate]:
    """Results and operands of products and convolutions, what derivative rules save, softmaxes,
    random masks, residual joins and the layer's input, in the order in which they are made.
    """
    found: dict[int, Candidate] = {}
    largest = max((graph.bytes(v) for v in graph.activations or graph.live), default=0)
    least = max(SMALLEST * largest, 1)
    # By the user already. What `checkpoint_name` names may still be the place of the tag.
    tagged = {v for n in graph.tags for v in n.outputs}
    tagged |= {v for n in graph.tags if n.primitive == tag_p.name for v in n.reads}
    rules = [n.call for n in graph.program.nodes if isinstance(n.call, DerivativeRule)]
    held = {v for rule in rules for v in rule.held}
    tagged |= held

    def add(value: int, kind: str, why: str, path: tuple[str, ...], role: str = "") -> None:
        computed = value in graph.live or value in graph.noise
        given = value in graph.program.inputs and value not in graph.activations
        if value in found or value in tagged or given or not computed:
            return
        if value not in graph.program.constants and graph.bytes(value) >= least:
            found[value] = Candidate(value, kind, why, path, role)

    for value in sorted(graph.activations):
        if graph.inexact(value):
            add(value, "residual", "the layer's input", ())
    for node in graph.program.nodes:
        if node.primitive == SOFTMAX:
            add(node.outputs[0], "softmax", "a softmax", node.path)
        elif is_costly(node):
            saved = node.call.saved if isinstance(node.call, DerivativeRule) else None
            for v in node.outputs:
                if v == saved:
                    add(v, EXACT, "saved by a derivative rule", node.path)
                elif v in graph.live and v not in held:
                    last = _cheapest_form(graph, v)
                    # It is named after the product, which is in the module that has the weights.
                    why = f"the result of {node.primitive}"
                    role = SCORES if is_score(graph, node, last) else ""
                    add(last, kind_of_product(graph, last), why, node.path, role)
            for v in node.reads:
                if v in graph.live:
                    first = _before_views(graph, v)
                    maker = graph.maker.get(first)
                    why = f"an operand of {node.primitive}"
                    add(first, kind_of(graph, first), why, maker.path if maker else ())
        for v in node.outputs:
            if _is_mask(graph, node, v):
                add(v, "mask", "a random mask", node.path)
            elif v in graph.live and graph.joins(v):
                add(v, "residual", "a residual sum", node.path)
    return sorted(found.values(), key=lambda c: graph.order[c.value])


def _cheapest_form(graph: LayerGraph, value: int) -> int:
    """Where a product's result lives on past bias, scale, cast and views, if these are all that
    read it: the last form that is not larger.
    """
    best = value
    while len(users := graph.used_by(value)) == 1 and value not in graph.outputs:
        (node,) = users
        if node.call is not None or node.primitive not in POINTWISE_LINEAR:
            break
        (result,) = node.outputs
        others = [v for v in node.reads if v != value]
        # Another activation, or a large array: the result is more than a form of the value.
        if any(v in graph.live or 8 * graph.bytes(v) > graph.bytes(value) for v in others):
            break
        if graph.count(result) != graph.count(value):
            break
        value = result
        best = value if graph.bytes(value) <= graph.bytes(best) else best
    return best


def _before_views(graph: LayerGraph, value: int) -> int:
    """The value of which `value` is a view, or a name: one tag whatever the readers' layouts."""
    passed = VIEWS | {name_p.name}
    while (node := graph.maker.get(value)) and node.primitive in passed and node.reads:
        earlier = node.reads[0]
        product = graph.maker.get(earlier)
        if node.primitive == "transpose" and product and product.primitive == "dot_general":
            break  # an einsum ends in it, and codecs look for channels along the last axis
        given = earlier in graph.program.inputs and earlier not in graph.activations
        if given or graph.bytes(earlier) > graph.bytes(value):
            break
        value = earlier
    return value


def _is_mask(graph: LayerGraph, node, value: int) -> bool:
    """Whether booleans are made here of random numbers, and not of other random booleans."""
    boolean = lambda v: graph.program.avals[v].dtype == bool
    return (
        value in graph.noise
        and value not in graph.live
        and boolean(value)
        and not any(boolean(v) for v in node.reads if v in graph.noise)
    )
