"""The layers that `auto` finds in a step, and the tensors that it tags, for display."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmem._core.assignment import Assignment
from jaxmem._core.bytes import show_bytes
from jaxmem._core.lists import aligned
from jaxmem._model.auto.step import planned_step
from jaxmem._model.layer.block import Layer
from jaxmem._model.layer.graph import LayerGraph
from jaxmem._trace.jaxpr import line_of
from jaxmem._trace.step import trace


def found_layers(step: Callable, args: tuple) -> tuple[Layer, ...]:
    """Returns the layers that `auto` finds in a step for these arguments, or for their shapes and
    dtypes: the first layer of each label, whose `turns` are the number of layers of the label.
    Raises StepError if it finds none.
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
    return tuple(
        dataclasses.replace(next(iter(found.values())), turns=sum(x.turns for x in found.values()))
        for found in by_label.values()
    )


def layer_data(layer: Layer) -> dict[str, Any]:
    """Returns a layer that `found_layers` found as JSON data. The bytes of a tag are the bytes
    of its tensor in one layer. The place of a tag is the user's file and line that computes the
    tensor; "" for the layer's input.
    """
    avals, graph = layer.program.avals, LayerGraph(layer.program, ())
    tags = [
        {
            "name": candidate.name,
            "kind": candidate.kind,
            "shape": tuple(avals[candidate.value].shape),
            "dtype": str(avals[candidate.value].dtype),
            "bytes": graph.bytes(candidate.value),
            "why": candidate.why,
            "place": line_of(maker.eqn) if (maker := graph.maker.get(candidate.value)) else "",
        }
        for candidate in layer.candidates
    ]
    return {"label": layer.label, "count": layer.turns, "place": layer.line, "tags": tags}


def layer_text(layer: Layer) -> str:
    """Returns a layer that `found_layers` found as text, with a table of its tags."""
    plural = "s" if layer.turns > 1 else ""
    head = f"{layer.label}: {layer.turns} layer{plural}, {layer.line}"
    tags = [tag | {"bytes": show_bytes(tag["bytes"])} for tag in layer_data(layer)["tags"]]
    columns = ("name", "kind", "shape", "dtype", "bytes", "why", "place")
    rows = [("tag", "kind", "shape", "dtype", "bytes", "why", "line")]
    rows += [tuple(str(tag[column]) for column in columns) for tag in tags]
    return "\n".join([head, *(f"  {line}" for line in aligned(rows))])
