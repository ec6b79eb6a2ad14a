"""Joins equal blocks of a traced step to classes, and makes the fingerprint of a model."""

import hashlib
import itertools
from collections.abc import Iterable

from jaxmem._core.profile import BlockClass
from jaxmem._cost.blocks.find import Blocks, Instance
from jaxmem._cost.blocks.segments import BlockGraph, graph_of
from jaxmem._model.tags.named import is_tag
from jaxmem._trace.rewrite import describe
from jaxmem.errors import StepError

NO_BLOCK = (
    "profile: the step has no block: no jax.checkpoint region with a jaxmem policy {why}. Wrap each"
    " layer: jax.checkpoint(layer, policy=jaxmem.remat_policy(plan)), nn.remat(Layer, policy=...)"
    " or nnx.remat(layer, policy=...), with the plan that `build` is given"
)


def classes_of(found: Blocks) -> list[BlockGraph]:
    """The graphs of a step's blocks, one for all blocks of equal label and graph.

    Raises StepError if the step has no block.
    """
    if not found.instances:
        undifferentiated = (
            "is differentiated: the blocks are there, but no gradient is taken through them"
        )
        why = undifferentiated if found.plain_labels else "is in it"
        raise StepError(NO_BLOCK.format(why=why))
    classes: dict[tuple, BlockGraph] = {}
    for instance in found.instances:
        graph = graph_of(instance)
        # Inputs that are charged belong to the key: the first layer of an unrolled loop reads the
        # step's own argument, which is always in memory. The other layers read a saved tensor.
        key = (instance.label, graph_key(graph), instance.charged, instance.backwards)
        before = classes.get(key)
        classes[key] = graph if before is None else before.joined(instance)
    return list(classes.values())


def at_once(sizes: Iterable[tuple[Instance, int]]) -> int:
    """The largest sum of sizes that are in memory at the same time, given the size of each block.
    Blocks in the bodies of loops that run one after the other, such as microbatches, are never in
    memory at the same time.
    """
    of: dict[int | None, int] = {None: 0}
    for instance, size in sizes:
        of[instance.home] = of.get(instance.home, 0) + size
    return of.pop(None) + max(of.values(), default=0)


def graph_key(graph: BlockGraph) -> str:
    """Returns a text that is equal for equal graphs: operations, shapes, tags, and needed values.

    Values are numbered in the order of their first use, since jaxprs of equal graphs may number
    values differently.
    """
    avals = graph.instance.flat.avals
    order = itertools.count()
    number: dict[int, int] = {}
    lines = []
    for e in graph.equations:
        for v in (*e.reads, *e.outputs):
            if v not in number:
                number[v] = next(order)
        name = e.eqn.params["name"] if is_tag(e.eqn) else ""
        reads, outputs = ([number[v] for v in side] for side in (e.reads, e.outputs))
        lines.append(f"{name} {describe(e, avals)} {reads} {outputs}")
    lines.append(f"{sorted(number.get(v, -1) for v in graph.needed)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def plan_fingerprint(blocks: Iterable[BlockClass]) -> str:
    """Returns the fingerprint that a plan is tied to, of labels, layers, and the name, shape and
    dtype of each tag.

    The fingerprint leaves out operations, so it is the same on every version of JAX.
    """
    blocks = list(blocks)
    turns = lambda t: f" x {t.turns}" if t.turns > 1 else ""
    lines = sorted(
        f"{b.name} {b.layers} {t.name} {t.shape} {t.dtype}{turns(t)}"
        for b in blocks
        for t in b.tags
    )
    # A block without tags has no line yet.
    lines += sorted(f"{b.name} {b.layers}" for b in blocks)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
