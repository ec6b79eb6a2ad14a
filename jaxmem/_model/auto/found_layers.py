"""The layers that `auto` finds in a step, and the tensors that it tags, for display."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxmem._core.assignment import Assignment
from jaxmem._core.bytes import show_bytes
from jaxmem._core.columns import aligned
from jaxmem._model.auto.step import planned_step
from jaxmem._model.layer.block import Layer
from jaxmem._model.layer.graph import LayerGraph
from jaxmem._trace.jaxpr import line_of
from jaxmem._trace.step import trace


@dataclasses.dataclass(frozen=True)
class FoundTag:
    """A tensor that `auto` tags.

    name, kind: the tag's name and kind.
    shape, dtype: the tensor's shape and dtype.
    bytes: the tensor's bytes in one layer.
    why: why the tensor gets a tag, in words.
    place: the user's file and line that computes the tensor; "" for the layer's input.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    why: str
    place: str


@dataclasses.dataclass(frozen=True)
class FoundLayers:
    """Layers that share their decisions.

    label: the label of the block in a plan.
    count: number of layers.
    place: the user's file and line of the first layer, or of the loop over layers.
    tags: the tags of a layer.
    """

    label: str
    count: int
    place: str
    tags: tuple[FoundTag, ...]

    def __str__(self) -> str:
        plural = "s" if self.count > 1 else ""
        head = f"{self.label}: {self.count} layer{plural}, {self.place}"
        rows = [("tag", "kind", "shape", "dtype", "bytes", "why", "line")]
        rows += [
            (t.name, t.kind, str(t.shape), t.dtype, show_bytes(t.bytes), t.why, t.place)
            for t in self.tags
        ]
        return "\n".join([head, *(f"  {line}" for line in aligned(rows))])


def found_layers(step: Callable, args: tuple) -> tuple[FoundLayers, ...]:
    """Returns the layers that `auto` finds in a step for these arguments, or for their shapes and
    dtypes. Raises StepError if it finds none.
    """
    nothing = Assignment.nothing()
    layers: list[Layer] = []
    planned = planned_step(step, nothing, layers)
    trace(lambda plan: planned, nothing, args)
    by_label: dict[str, dict[int, Layer]] = {}
    for layer in layers:
        # A layer in a conditional or a shard_map is found again if JAX traces it again.
        number = id(layer.program.nodes[0].eqn)
        by_label.setdefault(layer.label, {}).setdefault(number, layer)
    return tuple(_described([*layers.values()]) for layers in by_label.values())


def _described(layers: Sequence[Layer]) -> FoundLayers:
    """Returns the layers of one label as one description, with the tags of the first layer."""
    first = layers[0]
    graph = LayerGraph(first.program, ())
    tags = []
    for candidate in first.candidates:
        aval = first.program.avals[candidate.value]
        maker = graph.maker.get(candidate.value)
        tags.append(
            FoundTag(
                name=candidate.name,
                kind=candidate.kind,
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                bytes=graph.bytes(candidate.value),
                why=candidate.why,
                place=line_of(maker.eqn) if maker else "",
            )
        )
    count = sum(layer.turns for layer in layers)
    return FoundLayers(first.label, count, first.line, tuple(tags))
