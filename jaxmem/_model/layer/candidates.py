"""Which values of a layer are worth a decision, with their kinds and their names.

The kind of a value decides its codec. It is derived from the operations that make the value, and
from the operations that read it. A name consists of the modules and functions that compute the
value.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from jaxmem._model.codecs.registry import EXACT
from jaxmem._model.layer.graph import RULE, SOFTMAX, LayerGraph, is_costly, through
from jaxmem._model.layer.rules import DerivativeRule
from jaxmem._model.tags.primitive import name_p, tag_p
from jaxmem._trace.primitives import POINTWISE_LINEAR, VIEWS
from jaxmem._trace.rewrite import Node

SMALLEST = 1 / 64  # of the largest activation: a smaller value is not worth a decision
SCORES = "scores"  # the role of an attention's scores
MOST_CANDIDATES = 24  # of a layer: more candidates cost more planning time than they save
INPUT = "in"  # the name of the layer's input
# Operations between a projection and its attention: views, slices, rotations and scales.
_HANDED = VIEWS | {"split", "concatenate", "mul", "add", "sub", "neg", "select_n", "div"}
_FARTHEST = 6  # operations between a projection and the batched product of its attention
# Operations between scores and their softmax: masks, scales, bounds and views.
_SCORED = _HANDED | {"tanh", "max", "min", "copy"}
_CURVED = {"tanh", "erf", "erfc", "logistic", "custom_jvp_call", "max", "exp"}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A value that gets a tag.

    value: the number of the value.
    kind: the kind of tensor, one of `jaxmem.codecs.KINDS`.
    why: why the value is a candidate, in words.
    path: the modules and functions that compute the value.
    role: the role of the value in the layer, if it is more specific than the kind. The name then
      ends in the role.
    named: results of the user's `checkpoint_name`s that the tag replaces.
    name: the name of the tag.
    """

    value: int
    kind: str
    why: str
    path: tuple[str, ...] = ()
    role: str = ""
    named: tuple[int, ...] = ()
    name: str = ""


def candidates(graph: LayerGraph) -> list[Candidate]:
    """Returns the candidates of a layer, in the order in which they are computed: results and
    operands of products and convolutions, tensors that derivative rules save, softmaxes, random
    masks, residual sums and the layer's input.
    """
    found: dict[int, Candidate] = {}
    largest = max((graph.bytes(v) for v in graph.activations or graph.live), default=0)
    least = max(SMALLEST * largest, 1)
    # Values that the user has tagged. A tag may still replace a `checkpoint_name`.
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
                    # The name is the path of the product, which is in the module of the weights.
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
    """Follows a product's result through bias, scale, cast and views, as long as nothing else reads
    it. Returns the last of these values that is not larger than the result.
    """
    best = value
    while len(users := graph.used_by(value)) == 1 and value not in graph.outputs:
        (node,) = users
        if node.call is not None or node.primitive not in POINTWISE_LINEAR:
            break
        (result,) = node.outputs
        others = [v for v in node.reads if v != value]
        # Another operand is an activation or large: the result depends on more than the value.
        if any(v in graph.live or 8 * graph.bytes(v) > graph.bytes(value) for v in others):
            break
        if graph.count(result) != graph.count(value):
            break
        value = result
        best = value if graph.bytes(value) <= graph.bytes(best) else best
    return best


def _before_views(graph: LayerGraph, value: int) -> int:
    """Returns the value behind views and `checkpoint_name`s, so that readers of different layouts
    share one tag.
    """
    passed = VIEWS | {name_p.name}
    while (node := graph.maker.get(value)) and node.primitive in passed and node.reads:
        earlier = node.reads[0]
        product = graph.maker.get(earlier)
        if node.primitive == "transpose" and product and product.primitive == "dot_general":
            break  # the transpose ends an einsum, and codecs need channels along the last axis
        given = earlier in graph.program.inputs and earlier not in graph.activations
        if given or graph.bytes(earlier) > graph.bytes(value):
            break
        value = earlier
    return value


def _is_mask(graph: LayerGraph, node, value: int) -> bool:
    """Whether the node makes booleans from random numbers, and not from other random booleans."""
    boolean = lambda v: graph.program.avals[v].dtype == bool
    return (
        value in graph.noise
        and value not in graph.live
        and boolean(value)
        and not any(boolean(v) for v in node.reads if v in graph.noise)
    )


def kind_of(graph: LayerGraph, value: int) -> str:
    """Returns the kind of a value, one of `jaxmem.codecs.KINDS`."""
    if value not in graph.maker:  # an input, or a closed-over array
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
    """Returns "qkv" for an operand of an attention, else "linear"."""
    # An attention reads its operands by products with batch dimensions.
    attends = lambda node: is_costly(node) and _is_batched(node)
    return "qkv" if _is_read(graph, value, attends, _HANDED) else "linear"


def _is_read(
    graph: LayerGraph,
    value: int,
    by: Callable[[Node], bool],
    passing: Collection[str],
    depth: float = _FARTHEST,
) -> bool:
    """Whether a node for which `by` is true reads the value, directly or through at most `depth`
    operations of the primitives `passing`.
    """
    for node in graph.used_by(value):
        if by(node):
            return True
        handed = depth > 0 and node.call is None and node.primitive in passing
        if handed and any(_is_read(graph, v, by, passing, depth - 1) for v in node.outputs):
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
    begins = lambda node: node.primitive == SOFTMAX or is_exponential(graph, node)
    return of_two and _is_batched(product) and _is_read(graph, value, begins, _SCORED)


def is_exponential(graph: LayerGraph, node: Node) -> bool:
    """Whether a node is exp(z - max z) of a softmax whose division is elsewhere: the result is
    summed, and the sums may divide a later value, such as the result of an attention's product.
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
    sums = lambda node: node.primitive == "reduce_sum"
    return _is_read(graph, node.outputs[0], sums, VIEWS, math.inf)


def _between(graph: LayerGraph, value: int) -> set[str]:
    """Returns the operations between the last products and residual sums and the value, along
    values that depend on activations. A softmax is one operation.
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


def named(graph: LayerGraph, found: Sequence[Candidate]) -> list[Candidate]:
    """Returns candidates with unique names, which an edit elsewhere in the layer does not change.

    A name is the path without the parts that all candidates share, and the kind if the path is not
    enough: "attention.query", "mlp.gelu". The second value of a name is "mlp.gelu_2". A tag that
    replaces `checkpoint_name`s already has their name.
    """
    paths = [_words(c.path) for c in found]
    shared = _shared([path for path in paths if path])
    taken = {node.eqn.params["name"] for node in graph.tags}
    times: Counter[str] = Counter()
    result = []
    for candidate, path in zip(found, paths):
        if candidate.named:  # the user's own name
            result.append(candidate)
            continue
        # The name of a rule is the name of its function, even if all paths share it.
        of_rule = candidate.kind == EXACT
        own = path[shared:] or (path[-1:] or (RULE,) if of_rule else ())
        told = own and (of_rule or candidate.kind in ("linear", "qkv")) and not candidate.role
        base = ".".join(own if told else (*own, candidate.role or candidate.kind))
        if candidate.value in graph.program.inputs:
            base = INPUT
        times[base] += 1
        name = base if times[base] == 1 else f"{base}_{times[base]}"
        while name in taken:  # the user's own tag has this name
            name += "_auto"
        result.append(dataclasses.replace(candidate, name=name))
    return result


def _words(path: Sequence[str]) -> tuple[str, ...]:
    """Returns the modules and functions of a path, each once, without the parts that JAX's
    transformations add and without private functions.
    """
    words = []
    for part in path:
        if part.startswith("@_") or part == "@":
            continue
        part = re.sub(r"^(?:@|\w+\()+|\)+$", "", part).lstrip("_")
        if re.fullmatch(r"\w+", part) and part not in words:
            words.append(part)
    return tuple(words)


def _shared(paths: Sequence[tuple[str, ...]]) -> int:
    """Returns the number of leading parts that all paths share."""
    count = 0
    while paths and all(len(p) > count and p[count] == paths[0][count] for p in paths):
        count += 1
    return count
