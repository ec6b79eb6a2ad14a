"""Names of a layer's candidates, from the modules and functions that they are computed in."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from jaxmem._model.codecs.registry import EXACT
from jaxmem._model.layer.candidates import Candidate
from jaxmem._model.layer.graph import RULE, LayerGraph

INPUT = "in"


def named(graph: LayerGraph, found: Sequence[Candidate]) -> list[Candidate]:
    """`found` with names that are unique, and that an edit elsewhere in the layer does not change.

    A name is the path below what all candidates share, and the kind where the path does not tell:
    "attention.query", "mlp.gelu". A second value of one name is "mlp.gelu_2". A tag that stands for
    `checkpoint_name`s has their name already.
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
        # A rule is called after the function whose it is, though nothing else has a name.
        of_rule = candidate.kind == EXACT
        own = path[shared:] or (path[-1:] or (RULE,) if of_rule else ())
        told = own and (of_rule or candidate.kind in ("linear", "qkv")) and not candidate.role
        base = ".".join(own if told else (*own, candidate.role or candidate.kind))
        if candidate.value in graph.program.inputs:
            base = INPUT
        times[base] += 1
        name = base if times[base] == 1 else f"{base}_{times[base]}"
        while name in taken:  # a tag of the user's own has it
            name += "_auto"
        result.append(dataclasses.replace(candidate, name=name))
    return result


def _words(path: Sequence[str]) -> tuple[str, ...]:
    """The modules and functions of a path: without those that JAX's transformations add, without
    private ones, and each once.
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
    """How many parts all paths begin with."""
    count = 0
    while paths and all(len(p) > count and p[count] == paths[0][count] for p in paths):
        count += 1
    return count
