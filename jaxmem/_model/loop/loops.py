"""The loops of a stack: one forward loop for each run of layers that share a policy and a stack,
and one backward loop, which makes the gradient of one layer at a time and passes it on at once.

A loop passes on the layer that it fetched last. After a stack's last layer, the forward has fetched
that layer again, and the backward begins with it. Before the stack's first layer, the backward has
fetched the layer with which the next microbatch begins.

The alternative is to fetch each of these layers anew. XLA would read such a layer by a kernel,
because it knows the offsets of slices in a loop alone. In a loop over microbatches, a kernel that
reads host memory is refused (`fault` in `_target/hlo/transfers.py`).
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._model.loop.layer import Residuals, forward
from jaxmem._model.states.store import after, ahead, counted, put, streams, taken
from jaxmem._model.tags.policy import Policy, for_jax

# (k, state of stack k, i, gradient of layer i of the stack, parameters of the layer) -> (new state
# of the layer, results of the layer that the loop stacks)
Into = Callable[[int, Any, Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Layers that one loop runs: they share a policy, and their arrays are in one stack.

    layers: the layers, counted over the whole model.
    policy: the policy of the layers.
    stack: the index of their stack.
    first: the number of the stack's first layer.
    buffered: whether the forward keeps the parameters that it fetched for the backward.
    before_buffered: whether a buffered run of the same stack follows. The backward then begins this
      run without a fetched layer, and the forward passes it the parameters of the last layer.
    span: number of layers of a span: only the inputs of spans are saved through the step, and the
      backward of a span runs its layers forward again first. 1 if each layer's tensors are saved
      through the step.
    """

    layers: range
    policy: Policy
    stack: int
    first: int
    buffered: bool = False
    before_buffered: bool = False
    span: int = 1

    @property
    def within(self) -> tuple[int, int]:
        """The first layer, counted within the stack, and the number of layers."""
        return self.layers.start - self.first, len(self.layers)


def runs_of(
    groups: Mapping[range, Policy], lengths: Sequence[int], buffers: int = 0
) -> tuple[LayerRun, ...]:
    """Returns the runs of layers, in order: a plan's groups, divided at the ends of stacks. The
    layers of a group after its last whole span are a run without spans: their backward runs before
    the tensors of any span exist.

    groups: the policy of each group of layers.
    lengths: the number of layers of each stack.
    buffers: the number of layers, the last ones, whose parameters are buffered.
    """
    ends = list(itertools.accumulate(lengths, initial=0))
    cuts = sorted({*ends, ends[-1] - buffers})
    found = []
    for group, policy in groups.items():
        for begin, end in itertools.pairwise(cuts):
            start, stop = max(group.start, begin), min(group.stop, end)
            if start < stop:
                k = bisect.bisect_right(ends, start) - 1
                buffered = start >= ends[-1] - buffers
                before = not buffered and stop == ends[-1] - buffers < ends[k + 1]
                whole = stop - (stop - start) % policy.span
                for layers, span in (range(start, whole), policy.span), (range(whole, stop), 1):
                    if layers:
                        run = LayerRun(layers, policy, k, ends[k], buffered, before, span)
                        found.append(run)
    return tuple(found)


def fetched_first(stacks) -> list[list]:
    """Prefetches the first layer of each stack, with which a forward begins."""
    return [ahead(stacked, 0) for stacked in stacks]


@dataclasses.dataclass(frozen=True)
class Loops:
    """The forward and the backward loop of a stack, over all runs of its layers.

    layer: `layer(own, x, common) -> (x, aux)`. `own` (one layer's arrays) and `common` (the arrays
      that all layers read) are pairs of the differentiated arrays and the other arrays.
    own: `own(parameters, key, i)` makes such a pair from layer i's parameters and the stack's key.
      The layer's other arrays are a pair of frozen parameters and the layer's key.
    runs: the runs of layers, in order.
    """

    layer: Callable
    own: Callable
    runs: tuple[LayerRun, ...]

    def plain(self, stacks, key, x, common):
        """Returns the output, and the auxiliary outputs of all layers, stacked. Saves nothing: it
        runs when nothing is differentiated.

        stacks: the parameters' stacks, each a tree of arrays with a leading axis of layers.
        key: the layers' key, or None.
        """
        one = lambda own, x: self.layer(own, x, common)
        extras, held = [], fetched_first(stacks)
        for run in self.runs:
            through = self._through(run, stacks[run.stack], key, x, one, held[run.stack])
            x, (extra, _), held[run.stack], _ = through
            extras.append(extra)
        return x, _joined(extras)

    def forward(self, stacks, key, x, common, held: list[list]):
        """Returns the results of `plain`, and the arguments `saved` and `held` of `backward`.

        `saved` has an entry for each run: the saved arrays of its layers, stacked; the fetched
        parameters, stacked, if the run is buffered; the arrays that are equal in all layers; and
        the `Residuals`, which rebuild the closures. The entry of a run in spans is the inputs of
        its spans, stacked, and `common`. `held` has the prefetched arrays of the next layer of each
        stack.

        held: the prefetched arrays of each stack's first layer, from `fetched_first` or from the
          backward of the previous microbatch.
        """
        extras, saved, held, last = [], [], list(held), list(held)
        for run in self.runs:
            k = run.stack
            if run.span > 1:
                x, extra, inputs = self._forward_spans(run, stacks[k], key, x, common)
                saved.append((inputs, common))
            else:
                saving = self._saving(run, stacks[k], key, x, common, held[k], *run.within)
                x, extra, one, held[k], now = saving
                last[k] = last[k] if run.buffered else now
                saved.append(one)
            extras.append(extra)
        return x, _joined(extras), saved, last

    def _saving(self, run: LayerRun, stacked, key, x, common, held: list, start, count: int):
        """Runs `count` layers of a run from layer `start` on, and saves what the run's policy
        saves. Returns x; the auxiliary outputs, stacked; the entry of `saved`; and the last two
        results of `_through`.
        """
        # Forward and backward are separate loops, so no barrier against common-subexpression
        # elimination is needed.
        layer = jax.checkpoint(self.layer, policy=for_jax(run.policy), prevent_cse=False)
        box: list[Residuals] = []  # one for each trace of `one`; the last trace runs

        def one(own, x):
            (x, extra), kept, residuals = forward(layer, own, x, common, len(own[1][0]))
            box.append(residuals)
            return x, (extra, kept)

        through = self._through(run, stacked, key, x, one, held, start, count)
        x, ((extra, kept), fetched), held, now = through
        # Shared arrays are computed outside the scan: an output of the scan would be stacked, with
        # a copy for each layer.
        shared = box[-1].shared(jax.tree.leaves(common))
        return x, extra, (kept, fetched, shared, box[-1]), held, now

    def _forward_spans(self, run: LayerRun, stacked, key, x, common):
        """Runs the spans of a run. Returns x; the auxiliary outputs of all layers, stacked; and the
        inputs of the spans, stacked. Nothing else is saved.
        """
        one = lambda own, x: self.layer(own, x, common)
        held = ahead(stacked, 0)  # nothing, since no layer is in host memory

        def body(x, i, _):
            y, (extra, _), _, _ = self._through(run, stacked, key, x, one, held, i, run.span)
            return y, (extra, x)

        start, count = run.within
        x, (extras, inputs) = counted(body, x, None, start, count // run.span, step=run.span)
        return x, _layers_of(extras), inputs

    def _through(
        self, run: LayerRun, stacked, key, x, one: Callable, held: list, start=None, count: int = 0
    ):
        """Runs `x, y = one(own, x)` over `count` layers of a run from layer `start` of the stack
        on, or without `start` over all of the run's layers.

        Returns x; a pair of every y, stacked, and of the fetched parameters, if the run is
        buffered; the prefetched arrays of the layer after the layers; and the prefetched arrays of
        the layer with which the backward begins the run.
        """
        start, count = run.within if start is None else (start, count)

        def body(carry, i, _):
            x, held, _ = carry
            # Arrays in host memory are copied one layer ahead, overlapped with this layer's
            # compute.
            parameters, following = taken(stacked, held, i), ahead(stacked, i + 1)
            x, y = one(self.own(parameters, key, run.first + i), x)
            kept = [held if which else [] for which in (run.before_buffered, run.buffered)]
            return (x, following, kept[0]), (y, kept[1])

        carry = x, held, held if run.before_buffered else []
        (x, following, own), ys = counted(body, carry, None, start, count)
        # After a stack's end, `following` is the last layer again.
        return x, ys, following, own if run.before_buffered else following

    def backward(
        self,
        parameters: Callable,
        key,
        saved,
        held: list[list],
        cotangents,
        states: Sequence,
        into: Into,
    ):
        """Runs the layers backward, from the last to the first.

        Returns the cotangents of `x` and of `common[0]`; the states of the stacks, with layer i
        replaced by the first result of `into(k, state, i, gradient, parameters)`; for each stack k
        the second results of `into`, stacked; and the prefetched arrays with which the next forward
        begins, if it has the same parameters.

        parameters: `parameters(k, state)` returns stack k of the parameters, of which layers are
          read again. `state` is the state of the stack: parameters that `into` replaces must be
          read from the state.
        key: the layers' key, or None.
        saved, held: the results of `forward`.
        cotangents: the cotangents of the output and of the stacked auxiliary outputs, and zeros
          like `common[0]`, to which every layer's cotangent is added.
        states: for each stack, the arrays that receive the layers' gradients: a buffer for all
          gradients, or moments.
        into: uses a layer's gradient, which nothing else reads.
        """
        states, told, held = list(states), [[] for _ in states], list(held)
        d_x, d_extra, d_common = cotangents
        for run, one in reversed(list(zip(self.runs, saved))):
            k, layers = run.stack, run.layers
            of_run = jax.tree.map(lambda a, r=layers: a[r.start : r.stop], d_extra)
            carry = d_x, d_common, states[k], [] if run.buffered else held[k]
            back = self._back_spans if run.span > 1 else self._back
            carry, tells = back(run, parameters, key, one, of_run, carry, into, *run.within)
            d_x, d_common, states[k], following = carry
            if not run.buffered:
                held[k] = following  # before a stack's first layer, the first layer again
            elif run.within[0] == 0:
                held[k] = jax.tree.map(lambda a: a[0], one[1])
            told[k].insert(0, tells)
        return d_x, d_common, states, [*map(_joined, told)], held

    def _back(
        self, run: LayerRun, parameters, key, saved, d_extra, carry, into: Into, start, count: int
    ):
        """Runs `count` layers of a run backward, down to layer `start` of the stack.

        saved: the entry of `saved` in `backward`.
        d_extra: the cotangents of the layers' auxiliary outputs, stacked.
        carry: the cotangents of the last layer's output and of `common[0]`, the state of the stack,
          and the prefetched arrays of the last layer.

        Returns the carry after the layers, and the second results of `into`, stacked.
        """
        kept, fetched, shared, residuals = saved

        # The loop carries the state, so that XLA updates the state in place. A stacked output of
        # the scan would be stored in addition to the old state.
        def body(carry, i, one):
            d_x, d_common, state, held = carry
            kept, fetched, d_extra = one
            stacked = parameters(run.stack, state)
            if run.buffered:
                own, following = taken(stacked, fetched, i), []
            else:
                own, following = taken(stacked, held, i), ahead(stacked, i - 1)
            leaves = jax.tree.leaves(self.own(own, key, run.first + i))
            pull = residuals.closure(leaves, kept, shared)
            gradient, d_x, more = pull((d_x, d_extra))
            d_common = jax.tree.map(jnp.add, d_common, more)
            new, tells = into(run.stack, state, i, gradient, own)
            new = after(new, following) if streams(state) else new
            return (d_x, d_common, put(state, new, i), following), tells

        return counted(body, carry, (kept, fetched, d_extra), start, count, reverse=True)

    def _back_spans(
        self, run: LayerRun, parameters, key, saved, d_extra, carry, into: Into, start, count: int
    ):
        """Runs the spans of a run backward, as `_back` runs layers. Each span is run forward again
        first, and saves what the run's policy saves of its layers.
        """
        inputs, common = saved
        held = carry[-1]  # nothing: layers in spans are in device memory

        def body(carry, i, one):
            x, d_extra = one
            stacked = parameters(run.stack, carry[2])
            saving = self._saving(run, stacked, key, x, common, held, i, run.span)
            carry = *carry, held
            back = self._back(run, parameters, key, saving[2], d_extra, carry, into, i, run.span)
            carry, tells = back
            return carry[:3], tells

        spans = count // run.span
        by_span = jax.tree.map(lambda a: a.reshape(spans, run.span, *a.shape[1:]), d_extra)
        done, tells = counted(
            body, carry[:3], (inputs, by_span), start, spans, step=run.span, reverse=True
        )
        return (*done, held), _layers_of(tells)


def _layers_of(by_span):
    """Returns arrays that are stacked by span and by layer as arrays that are stacked by layer."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), by_span)


def _joined(parts):
    """Joins the results of the runs, stacked by layer, to one stack of all layers."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
