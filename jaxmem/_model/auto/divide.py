"""Divides a loss at its loop over layers into the functions before, in and after the loop.

A released step runs the loop itself, since it uses each layer's gradient when the gradient appears.
So the loss is traced, and its largest `jax.lax.scan` that reads slices of parameters is taken out
of the trace. The operations before the loop become `embed`, its body `block`, and the operations
that lead from the loop's results to the loss `head`. An operation that both `embed` and `head` need
runs twice, on values that are small beside a layer's: a mask, or positions.

A value of the loop's body has one of five sources. A slice of a parameter is the layer's own. A
slice of a computed array (a key, a rate) is read from the whole array by the layer's number. A
constant, and a carry that the body does not change, is shared by all layers. A counter is its first
value and the layer's number. A floating-point carry is what one layer passes to the next. The
layer's number is passed from layer to layer as a floating-point array, because arrays that layers
pass on have gradients.

Under a plan, loops before and after this loop, such as an encoder or the chunks of a loss, become
blocks as in `jaxmem.auto`.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._core.groups import is_auto
from jaxmem._core.lists import merged, separated
from jaxmem._model.auto.find import Finder, is_loop, loops_named, read, turn
from jaxmem._model.layer.block import layer_of
from jaxmem._model.layer.graph import LayerGraph, flops, through
from jaxmem._trace.jaxpr import ClosedJaxpr, Literal, Scan, as_closed, as_scan, inside, line_of
from jaxmem._trace.primitives import REMAT
from jaxmem._trace.rewrite import Node, Program, evaluated, leading_to, program_of
from jaxmem.errors import NoLayersError


@dataclasses.dataclass(frozen=True, eq=False)
class DividedLoss:
    """A loss as three functions of leaves of its parameters.

    layers: the numbers of the leaves whose slices the loop over layers reads, in order.
    embed: `embed(outer, rest)` returns the input of the first layer, and the arrays that all layers
      share. `outer` are the leaves outside the layers, and `rest` the leaves of the other
      arguments.
    block: `block(layer, x, *shared)` returns the next layer's input, and the values that the loop
      stacks. `layer` are the slices of the layers' leaves.
    head: `head(outer, x, stacked, rest)` returns the loss, and a list of the arrays that the loss
      returns after the loss itself.
    """

    layers: tuple[int, ...]
    embed: Callable
    block: Callable
    head: Callable


def divided_loss(
    closed: ClosedJaxpr,
    paths: Sequence[str],
    label: str,
    plan: Any = None,
    frozen: Collection[int] = (),
) -> DividedLoss:
    """Divides the trace of a loss.

    closed: the trace. Its first inputs are the leaves of the parameters, and its first output is
      the loss.
    paths: the path of each leaf of the parameters, for errors.
    label: the label under which a plan decides the layers.
    plan: the plan: the layers' tensors get tags, and the layers of other loops become blocks. None
      leaves the loss as it is, with its own checkpoints.
    frozen: the numbers of the leaves that are not trained. The layers of the loop have at least one
      trained leaf.

    Raises NoLayersError if no loop reads slices of trained parameters, or if something other than
    the loop reads the leaves that the loop slices.
    """
    program = program_of(closed, lambda eqn: eqn.primitive.name in REMAT and not holds_loop(eqn))
    own = dict(zip(program.inputs, range(len(paths))))
    loops = (_Loop.of(program, node, own, frozen) for node in program.nodes)
    found = [loop for loop in loops if loop is not None and loop.trains]
    if not found:
        raise NoLayersError(_no_loop(program))
    return max(found, key=lambda loop: flops(loop.node)).divided(paths, label, plan)


def holds_loop(eqn) -> bool:
    """Whether a call holds a scan that may be the loop over layers."""
    return any(e.primitive.name == "scan" and e.params["length"] > 1 for e in inside(eqn))


class _Loop:
    """A scan whose iterations read slices of parameters.

    program: the loss.
    node: the scan.
    own: leaf numbers of the parameters, by value.
    scan: how many arrays the iterations share, and how many they carry.
    leaves: for each sliced array, the parameter's value and the conversions of it; None for an
      array that is no parameter.
    frozen: the numbers of the leaves that are not trained.
    """

    def __init__(self, program: Program, node: Node, own: dict, scan: Scan, leaves: list, frozen):
        self.program, self.node, self.own, self.frozen = program, node, own, frozen
        self.consts, self.carry = scan.consts, scan.carry
        self.leaves: list[tuple[int, list[Node]] | None] = leaves

    @staticmethod
    def of(program: Program, node: Node, own: dict[int, int], frozen) -> "_Loop | None":
        """Returns the loop; None for another operation, and for a loop that slices no parameter."""
        scan = as_scan(node.eqn) if is_loop(node) and not node.eqn.params["reverse"] else None
        if scan is None:
            return None
        graph = LayerGraph(program, ())

        def leaf(value):
            converts = lambda made: made.primitive == "convert_element_type"
            source, passed = through(graph, value, converts)
            return (source, passed[::-1]) if isinstance(source, int) and source in own else None

        leaves = [leaf(v) for v in node.inputs[scan.consts + scan.carry :]]
        return _Loop(program, node, own, scan, leaves, frozen) if any(leaves) else None

    @property
    def trains(self) -> bool:
        """Whether the loop slices a trained parameter."""
        return not all(map(self._is_frozen, filter(None, self.leaves)))

    def _is_frozen(self, leaf: tuple[int, list[Node]] | None) -> bool:
        """Whether a sliced array is a parameter that is not trained."""
        return leaf is not None and self.own[leaf[0]] in self.frozen

    def divided(self, paths: Sequence[str], label: str, plan: Any) -> DividedLoss:
        program, node = self.program, self.node
        layers = list(dict.fromkeys(leaf[0] for leaf in self.leaves if leaf is not None))
        outer = [v for v in self.own if v not in layers]
        rest = program.inputs[len(self.own) :]
        consts = node.inputs[: self.consts]
        first = node.inputs[self.consts : self.consts + self.carry]
        sliced = node.inputs[self.consts + self.carry :]
        whole = [v for v, leaf in zip(sliced, self.leaves) if leaf is None]
        kinds = self._kinds()
        moves = [kind == "passed" for kind in kinds]
        passed, fixed = separated(first, moves)
        _, still = separated(kinds, moves)
        others = [n for n in program.nodes if n is not node]
        before, after = [*passed, *consts, *fixed, *whole], [*program.outputs]
        finder = Finder(plan, first=int(is_auto(label)))

        def values_of(wanted) -> Callable[[dict], list]:
            """A function that computes values from the leaves' and the loop's values."""
            nodes = tuple(leading_to(others, wanted))
            self._check_alone(nodes, wanted, layers, paths)
            if plan is not None:
                part = dataclasses.replace(program, nodes=nodes, outputs=tuple(wanted))
                nodes = finder.with_blocks(part).nodes

            return lambda known: evaluated(wanted, nodes, program.constants | known, Node.run)

        values_before, values_fixed, values_after = map(values_of, (before, fixed, after))

        def known(leaves, arguments) -> dict:
            return dict(zip(outer, leaves)) | dict(zip(rest, arguments))

        def embed(leaves, arguments):
            found = values_before(known(leaves, arguments))
            x, shared = found[: len(passed)], found[len(passed) :]
            return (x, jnp.zeros((), jnp.float32)), *shared

        body = self._body(None if plan is None else label)

        def block(layer, x, *shared):
            carried, number = x
            own = dict(zip(layers, layer))
            i = number.astype(jnp.int32)
            whole_consts, rest = shared[: len(consts)], shared[len(consts) :]
            arrays, slices = iter(rest[len(fixed) :]), []
            starts = [_at(a, i, kind) for a, kind in zip(rest, still)]
            carry = merged((carried, starts), moves)
            for leaf in self.leaves:
                if leaf is None:
                    slices.append(jax.lax.dynamic_index_in_dim(next(arrays), i, keepdims=False))
                else:
                    slices.append(_converted(own[leaf[0]], leaf[1]))
            results = body(*whole_consts, *carry, *slices)
            next_carry, _ = separated(results, moves)
            return (next_carry, number + 1), list(results[self.carry :])

        def head(leaves, x, stacked, arguments):
            start = known(leaves, arguments)
            turns = node.eqn.params["length"]
            last = [_at(a, turns, kind) for a, kind in zip(values_fixed(start), still)]
            out = merged((x[0], last), moves)
            results = dict(zip(node.outputs, [*out, *stacked]))
            loss, *reported = values_after(start | results)
            return loss, reported

        return DividedLoss(tuple(self.own[v] for v in layers), embed, block, head)

    def _body(self, label: str | None) -> Callable[..., Sequence]:
        """The loop's body as a function; with tags if a plan decides its layers."""
        if label is None:
            body = as_closed(self.node.eqn.params["jaxpr"])
            plain = program_of(body, lambda eqn: eqn.primitive.name in REMAT)
            return lambda *inputs: plain.run(inputs)
        program, activations = turn(self.node, LayerGraph(self.program, ()))
        sliced = zip(program.inputs[self.consts + self.carry :], self.leaves)
        frozen = [v for v, leaf in sliced if self._is_frozen(leaf)]
        return layer_of(program, activations, label, frozen).tagged

    def _kinds(self) -> list[str]:
        """For each carried array: "passed" for floating-point arrays that the body changes, "kept"
        for an array that it returns as it is, "counted" for a counter. Raises NoLayersError for
        another array without a gradient.
        """
        body = read(as_closed(self.node.eqn.params["jaxpr"]))
        made = {v: n for n in body.nodes for v in n.outputs}
        kinds = []
        for v, out in zip(body.inputs[self.consts :], body.outputs[: self.carry]):
            maker = made.get(out) if isinstance(out, int) else None
            if out == v:
                kinds.append("kept")
            elif jnp.issubdtype(body.avals[v].dtype, jnp.inexact):
                kinds.append("passed")
            elif maker is not None and _counts(maker, v):
                kinds.append("counted")
            else:
                aval = body.avals[v].str_short()
                raise NoLayersError(
                    f"released_step: the loop over layers at {line_of(self.node.eqn)} carries"
                    f" {aval}, which has no gradient; expected floating-point arrays, a counter, or"
                    " arrays that the loop does not change: slice keys and numbers layer by layer"
                )
        return kinds

    def _check_alone(self, nodes, wanted, layers: Sequence[int], paths: Sequence[str]) -> None:
        """Raises NoLayersError if `nodes`, or `wanted`, read a leaf of the layers."""
        reads = [(v, line_of(n.eqn)) for n in nodes for v in n.reads]
        reads += [(v, "the loop itself") for v in wanted if isinstance(v, int)]
        for value, place in reads:
            if value in layers:
                raise NoLayersError(
                    f"released_step: `params{paths[self.own[value]]}` is sliced by the loop over"
                    f" layers at {line_of(self.node.eqn)}, and is also read at {place}; expected a"
                    " loss that reads the layers' parameters in the loop alone, since a layer's"
                    " gradient is used when the loop has made it"
                )


def _at(first, i, kind: str):
    """The value of a carry before iteration `i`, which the loop does not change or counts."""
    return first if kind == "kept" else first + jnp.asarray(i, jnp.result_type(first))


def _counts(node: Node, value: int) -> bool:
    """Whether a node adds 1 to a value."""
    one = [v for v in node.inputs if isinstance(v, Literal) and v.val == 1]
    return node.primitive == "add" and value in node.inputs and len(one) == 1


def _converted(array, conversions: Sequence[Node]):
    """A layer's slice, in the dtypes to which the loss converts the whole stack."""
    for node in conversions:
        array = jax.lax.convert_element_type(array, node.eqn.params["new_dtype"])
    return array


def _no_loop(program: Program) -> str:
    """The message for a loss without a loop over layers, with its loops."""

    def why(node: Node) -> str:
        if not is_loop(node):
            return "it multiplies no matrices"
        backward = node.eqn.params["reverse"]
        return "it runs backward" if backward else "it slices no parameter that is trained"

    return (
        f"released_step: no loop over layers was found in the loss ({loops_named(program, why)});"
        " expected two matrix products outside loops that read trained parameters, or a"
        " jax.lax.scan that runs forward, multiplies matrices and reads slices of trained"
        " parameters: stack the layers' parameters, or give embed, block and head; a model whose"
        " layers are all frozen needs no released step"
    )
