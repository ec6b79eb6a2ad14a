"""Runs functions with their layers as blocks, and says what was looked at where it finds none."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from jaxmem._core.assignment import Decisions
from jaxmem._model.auto.calls import Call, traced
from jaxmem._model.auto.find import Finder, read
from jaxmem._model.layer.block import Layer
from jaxmem._model.layer.graph import flops, uses_references
from jaxmem._trace.rewrite import Node, Program
from jaxmem._trace.source import place_of
from jaxmem.errors import NoLayersError

_SHOWN = 3  # loops


class Rewriter:
    """Rewrites the functions of one loss or step, so that their layers have labels of their own.

    It keeps no program: a training loop may call it in every step.

    found: whether a layer was found until now.
    error: what to say where none is, of the largest function that was looked through; None where
      there was no function.
    """

    def __init__(self, decided: Decisions, layers: list[Layer] | None = None):
        """layers: where those that are found are put, for who wants to see them."""
        self.found = False
        self.error: NoLayersError | None = None
        self._layers = layers
        self._work = -1.0  # FLOPs of the function that `error` is about
        self._decided = decided
        self._labels = 0
        self._first: dict[Any, int] = {}

    def with_blocks(self, function: Callable) -> Callable:
        """`function` with its layers as blocks; itself in effect where it has none."""

        @functools.wraps(function, updated=())
        def rewritten(*args, **kwargs):
            return self.result(function, traced(function, args, kwargs))

        return rewritten

    def result(self, function: Callable, call: Call):
        """The result of a traced call of `function`, computed with its layers as blocks."""
        program = read(call.closed)
        # JAX may trace the function again, for other shapes say: its layers keep their labels.
        code = getattr(inspect.unwrap(function), "__code__", type(function))
        operations = tuple(node.primitive for node in program.nodes)
        first = self._first.setdefault((code, operations), self._labels)
        finder = Finder(self._decided, first)
        # What is inside a conditional or a shard_map is searched when that is traced: as it runs.
        results = finder.with_blocks(program).run(call.arrays)
        self._labels = max(self._labels, finder.labels)
        self.found = self.found or bool(finder.found)
        if self._layers is not None:
            self._layers += finder.found
        if not self.found and (work := sum(map(flops, program.nodes))) > self._work:
            self._work, self.error = work, _no_layers(function, program)
        return call.returned(results)


def _no_layers(function: Callable, program: Program) -> NoLayersError:
    """The error, with the largest loops and why each is none over layers."""
    name = getattr(function, "__name__", type(function).__name__)
    loops = [n for n in program.nodes if n.primitive in ("scan", "while")]
    largest = sorted(loops, key=_size, reverse=True)[:_SHOWN]
    looked_at = "; ".join(f"the {n.primitive} at {place_of(n.eqn)}: {_why(n)}" for n in largest)
    products = sum(flops(n) > 0 for n in program.nodes)
    rest = f"of {products} matrix products outside loops, no layers of equal operations repeat"
    return NoLayersError(
        f"auto: no layer was found in {name!r} ({looked_at or 'it has no loop'}; {rest}). Layers"
        " are the turns of a jax.lax.scan, or equal ones after each other, that multiply matrices"
        " or convolve. Wrap a layer by hand: jax.checkpoint(layer,"
        " policy=jaxmem.remat_policy(plan))"
    )


def _size(node: Node) -> float:
    """FLOPs, or values where there are none: what makes a loop worth naming."""
    values = sum(math.prod(getattr(v.aval, "shape", ())) for v in node.eqn.outvars)
    return flops(node) or values * 1e-9


def _why(node: Node) -> str:
    if node.primitive == "while":
        return "a while loop has no derivative; a fori_loop of a known number of turns is a scan"
    if flops(node) == 0:
        return "its turns hold no matrix product"
    if uses_references(node):
        return "its turns read or write a jax.Ref, which no block may"
    return "it has one turn" if node.eqn.params["length"] < 2 else "its blocks are planned already"
