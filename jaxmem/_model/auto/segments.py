"""Cuts a loss whose layers are a Python loop, or are unlike each other, into segments, which are
differentiated one by one.

The layers of a Python loop are stretches of the loss's trace that repeat (`repeats.py`). Each
layer is a segment, and so is each stretch before, between and after layers. A released step runs
the segments forward in order and backward in reverse order, and uses the gradient of a parameter
as soon as the first segment that reads the parameter has run backward.

Layers that are unlike each other, as of a U-Net, begin with each product that reads parameters, and
so do the segments between loops.

Stacking the layers' parameters, and running a scan over them, is the alternative. The stacks would
be copies of the parameters, and the user's tree and its optimizer state would have another form.

A cast or a view of parameters alone belongs to no segment: each segment that reads the result
computes it from the parameters. Otherwise, in a loss that converts all parameters first, no
gradient would be complete before the end of the backward. Values that no gradient depends on, such
as masks and positions, are computed without a derivative: a segment reads them, and returns no
cotangent.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxmem._core.groups import AUTO, is_auto
from jaxmem._model.auto.divide import holds_loop
from jaxmem._model.auto.find import Finder, read
from jaxmem._model.auto.pieces import Values, part, with_views
from jaxmem._model.auto.repeats import SHORTEST, between, repeats
from jaxmem._model.layer.block import layers_of
from jaxmem._model.layer.graph import flops, is_inexact, views_of
from jaxmem._model.tags.policy import groups_of
from jaxmem._trace.jaxpr import ClosedJaxpr, as_scan, line_of, nbytes
from jaxmem._trace.primitives import REMAT
from jaxmem._trace.rewrite import Node, Program, evaluated, following, leading_to, program_of, run
from jaxmem.errors import NoLayersError


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of a loss, as a function of the values that it reads.

    layer: the number of the layer that the segment is; None between layers.
    leaves: the numbers of the parameters that it reads.
    takes: the values of earlier segments that it reads, and that gradients depend on.
    others: the other values that it reads.
    makes: the values that later segments read, and that gradients depend on.
    call: `call(leaves, takes, others)` returns the arrays of `makes`.
    rest: `rest(own, values)` returns the values that later segments read, and that no gradient
      depends on, by number. `own` are the segment's parameters by number, and `values` the values
      of earlier segments.
    """

    layer: int | None
    leaves: tuple[int, ...]
    takes: tuple[int, ...]
    others: tuple[int, ...]
    makes: tuple[int, ...]
    call: Callable[[Sequence, Sequence, Sequence], list]
    rest: Callable[[dict, dict], dict]


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentedLoss:
    """A loss as segments.

    segments: the segments, in the order in which they run.
    inputs: the values of the leaves of the loss's arguments after the parameters.
    output: the value of the loss.
    reported: `reported(leaves, values)` returns the arrays that the loss returns after the loss
      itself. `leaves` are the parameters by number, and `values` the values of segments.
    owned: for each layer, the numbers of the parameters that it alone reads.
    placed: the numbers of the layers whose states may lie in host memory: the layers of the Python
      loop that has most bytes of parameters, or all layers if they are unlike each other.
    label: the label of the block of these layers in a plan.
    frozen: the numbers of the parameters that are not trained.
    """

    segments: tuple[Segment, ...]
    inputs: tuple[int, ...]
    output: int
    reported: Callable[[Sequence, dict], list]
    owned: tuple[tuple[int, ...], ...]
    placed: range
    label: str
    frozen: Collection[int] = ()


class PythonLoops:
    """The layers of a loss's Python loops, or of a loss whose layers are unlike each other.

    program: the loss without casts and views of parameters.
    views: the casts and views of parameters.
    count: number of the parameters.
    frozen: the numbers of the parameters that are not trained.
    work: FLOPs of the layers; infinite for layers unlike each other, since no scan has layers then.
    scanned: FLOPs of the loss's largest scan.
    """

    def __init__(
        self,
        program: Program,
        views: list[Node],
        count: int,
        stretches: list[range],
        frozen: Collection[int],
    ):
        self.program, self.views, self.count = program, views, count
        self._stretches, self.frozen = stretches, frozen
        each = list(map(flops, program.nodes))
        work = sum(sum(each[s.start : s.stop]) for s in stretches)
        self.work = work if stretches else math.inf
        scans = [w for node, w in zip(program.nodes, each) if node.primitive == "scan"]
        self.scanned = max(scans, default=0.0)

    @staticmethod
    def of(
        closed: ClosedJaxpr, count: int, planned: bool, frozen: Collection[int] = ()
    ) -> "PythonLoops | None":
        """Finds the layers in the trace of a loss. Returns None if a scan over slices of parameters
        has them, or if no layer is found.

        closed: the trace. Its first `count` inputs are the leaves of the parameters, and its first
          output is the loss.
        planned: whether a plan decides the layers. Otherwise they keep their own checkpoints.
        frozen: the numbers of the leaves that are not trained.
        """
        keeps = lambda eqn: eqn.primitive.name in REMAT and not holds_loop(eqn)
        program = read(closed) if planned else program_of(closed, keeps)
        views = views_of(program, program.inputs[:count])
        is_view = {v for node in views for v in node.outputs}
        nodes = tuple(n for n in program.nodes if is_view.isdisjoint(n.outputs))
        program = dataclasses.replace(program, nodes=nodes)
        # A checkpoint that the user wrote is one operation, and may be a whole layer.
        shortest = 1 if any(n.primitive in REMAT for n in nodes) else SHORTEST
        if not isinstance(program.outputs[0], int):
            return None
        made = PythonLoops(program, views, count, repeats(program, shortest), frozen)
        return made if made._are_layers(is_view) else None

    def _are_layers(self, views: set[int]) -> bool:
        """Whether the stretches, and not scans over slices of parameters, have the layers. Two
        equal towers, each a scan over its layers, are two stretches. Without stretches and such
        scans, the layers are unlike each other: each is a segment of its own.

        views: the casts and views of parameters.
        """
        parameters = views.union(self.program.inputs[: self.count])

        def slices(node: Node) -> bool:
            scan = as_scan(node.eqn)
            first = len(node.inputs) if scan is None else scan.consts + scan.carry
            return not parameters.isdisjoint(v for v in node.inputs[first:] if isinstance(v, int))

        nodes = self.program.nodes
        if not self._stretches:
            given = self.program.inputs[: self.count]
            products = _products(nodes, given, self.frozen, self.views)
            return not any(map(slices, nodes)) and len(products) > 1
        inside = (n for s in self._stretches for n in nodes[s.start : s.stop] if slices(n))
        return sum(map(flops, inside)) <= 0.5 * self.work

    def segmented(self, plan: Any, label: str) -> SegmentedLoss:
        """Cuts the loss at its layers.

        plan: the plan that decides the layers, or None.
        label: the label under which the plan decides the layers of the first loop. Further loops
          have the labels `label_2`, `label_3`, and so on. The layers of scans between them become
          blocks as in `jaxmem.auto`, as layers that are unlike each other do.

        Raises NoLayersError if no layer has trained parameters that it alone reads.
        """
        program = self.program
        taken = len(self._stretches) if is_auto(label) else 0
        layers = [(s.start, s.start + s.step) for s in self._stretches]
        beside = max(itertools.starmap(Values(program, ()).inside, layers), default=0)
        finder = None if plan is None else Finder(plan, first=taken, beside=beside)
        cutter, done = _Cutter(self, finder), 0
        loops: dict[str, range] = {}  # the numbers of each loop's layers, by label
        if not self._stretches:
            cutter.unlike()
            return cutter.loss(_place(program.nodes), {label: range(cutter.layers)})
        for number, stretch in enumerate(self._stretches, 1):
            cutter.between(done, stretch.start)
            bounds = [(low, low + stretch.step) for low in stretch]
            parts = [part(program, low, high) for low, high in bounds]
            calls = [p.run for p in parts]
            own = label if number == 1 else f"{label}_{number}"
            loops[own] = range(cutter.layers, cutter.layers + len(parts))
            if plan is not None:
                layers = layers_of(parts, between(program, bounds), own, cutter.still)
                groups = groups_of(plan, own, len(layers))
                blocks = (layer.block_of(i, groups) for i, layer in enumerate(layers))
                calls = [lambda arrays, block=block: block(*arrays) for block in blocks]
            for stretch, call in zip(parts, calls):
                cutter.layer(stretch, call)
            done = bounds[-1][1]
        cutter.between(done, len(program.nodes))
        place = _place(program.nodes[self._stretches[0].start : self._stretches[0].stop])
        return cutter.loss(place, loops)


def _products(
    nodes: Sequence[Node], parameters: Iterable[int], frozen: Collection[int], views: Sequence[Node]
) -> list[int]:
    """Returns the positions of the matrix products that read trained parameters, or casts and views
    of them.
    """
    trained = following(views, (v for i, v in enumerate(parameters) if i not in frozen))
    return [i for i, n in enumerate(nodes) if flops(n) and not trained.isdisjoint(n.reads)]


def _place(nodes: Sequence[Node]) -> str:
    """The user's file and line of the first node that has one."""
    return next((line for node in nodes if (line := line_of(node.eqn))), "an unknown line")


class _Cutter:
    """Makes the segments of a loss.

    loops: the loss, and the casts and views of parameters, which each segment computes for itself.
    finder: makes blocks of scans between layers; None without a plan.
    """

    def __init__(self, loops: PythonLoops, finder: Finder | None):
        program, views, frozen = loops.program, loops.views, loops.frozen
        self.program, self.views, self.frozen, self.finder = program, views, frozen, finder
        self.numbers = {v: i for i, v in enumerate(program.inputs[: loops.count])}
        self.segments: list[Segment] = []
        self.layers = 0
        # The values that a gradient of a trained parameter depends on.
        self.active = {v for v, i in self.numbers.items() if i not in frozen}
        for node in (*views, *program.nodes):
            if not self.active.isdisjoint(node.reads):
                self.active.update(v for v in node.outputs if is_inexact(program.avals[v]))
        # Frozen parameters and their casts and views.
        made = {v for node in views for v in node.outputs} | {*self.numbers}
        self.still = sorted(made - self.active) if frozen else []

    def between(self, low: int, high: int) -> None:
        """Adds the segments of the nodes between two loops over layers."""
        for stretch in self._parts(low, high):
            self._add(stretch, stretch.run, None)

    def unlike(self) -> None:
        """Adds the program as layers that are unlike each other."""
        for stretch in self._parts(0, len(self.program.nodes)):
            self.layer(stretch, stretch.run)

    def _parts(self, low: int, high: int) -> list[Program]:
        """Returns nodes as parts, which begin at products that read trained parameters. Under a
        plan, each block is a part, and so is what is between blocks.
        """
        whole = part(self.program, low, high)
        if self.finder is not None:
            whole = self.finder.with_blocks(whole)
            blocks = (i for i, node in enumerate(whole.nodes) if node.primitive == AUTO)
            inner = itertools.chain(*((i, i + 1) for i in blocks))
        else:
            inner = _products(whole.nodes, self.numbers, self.frozen, self.views)[1:]
        ends = sorted({0, *inner, len(whole.nodes)})
        return [part(whole, *each) for each in itertools.pairwise(ends)]

    def layer(self, stretch: Program, call: Callable) -> None:
        """Adds the segment of a layer. `call` returns the outputs of `stretch` for its inputs."""
        self._add(stretch, call, self.layers)
        self.layers += 1

    def _add(self, stretch: Program, call: Callable, layer: int | None) -> None:
        piece = with_views(stretch, self.views)
        views = piece.nodes[: len(piece.nodes) - len(stretch.nodes)]
        own = [v for v in piece.inputs if v in self.numbers]
        values = [v for v in piece.inputs if v not in self.numbers]
        takes = [v for v in values if v in self.active]
        others = [v for v in values if v not in self.active]
        outputs = [v for v in stretch.outputs if isinstance(v, int)]
        makes = [v for v in outputs if v in self.active]
        rest = [v for v in outputs if v not in self.active]
        where = [stretch.outputs.index(v) for v in makes]

        def called(leaves, taken, given) -> list:
            known = dict(zip(own, leaves)) | dict(zip(takes, taken)) | dict(zip(others, given))
            known = run(views, self.program.constants | known, Node.run)
            results = call([known[v] for v in stretch.inputs])
            return [results[i] for i in where]

        numbers = tuple(self.numbers[v] for v in own)
        plain = leading_to(piece.nodes, rest)

        def fixed(parameters, values) -> dict:
            known = {v: parameters[self.numbers[v]] for v in own}
            known = run(plain, self.program.constants | values | known, Node.run)
            return {v: known[v] for v in rest}

        self.segments.append(
            Segment(layer, numbers, tuple(takes), tuple(others), tuple(makes), called, fixed)
        )

    def loss(self, place: str, loops: Mapping[str, range]) -> SegmentedLoss:
        """Returns the loss. Raises NoLayersError if no layer alone reads a trained parameter.

        place: the user's file and line of the first loop.
        loops: the numbers of the layers of each loop, by the loop's label.
        """
        readers: dict[int, list[Segment]] = {}
        for segment in self.segments:
            for i in segment.leaves:
                readers.setdefault(i, []).append(segment)
        alone = lambda s: tuple(sorted(i for i in s.leaves if readers[i] == [s]))
        owned = tuple(alone(s) for s in self.segments if s.layer is not None)
        if not any(i not in self.frozen for numbers in owned for i in numbers):
            raise NoLayersError(
                f"released_step: no layer of the Python loop at {place} reads a parameter that"
                " nothing else reads (a frozen parameter, a slice of stacked parameters, or a value"
                " that was computed from parameters before the loop, is none); expected trained"
                " parameters of its own for each layer, or a jax.lax.scan over stacked parameters,"
                " since the gradient of a layer's parameters is used when the layer has run"
                " backward; a model whose layers are all frozen needs no released step"
            )
        rest, output = self.program.inputs[len(self.numbers) :], self.program.outputs[0]
        assert isinstance(output, int)
        more = self.program.outputs[1:]
        views = leading_to(self.views, more)

        def reported(leaves: Sequence, values: dict) -> list:
            known = {v: leaves[i] for v, i in self.numbers.items()} | values
            return evaluated(more, views, self.program.constants | known, Node.run)

        size = lambda i: nbytes(self.program.avals[self.program.inputs[i]])
        most = lambda label: sum(size(i) for layer in loops[label] for i in owned[layer])
        label = max(loops, key=most)
        segments, of_placed = tuple(self.segments), (loops[label], label)
        return SegmentedLoss(segments, rest, output, reported, owned, *of_placed, self.frozen)
