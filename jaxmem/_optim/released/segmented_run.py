"""The forward of a loss in segments, and its backward, which uses the gradient of each parameter
when the gradient is complete.

A segment saves tensors as a layer of a stack does (`_model/loop/layer.py`): parameters, and casts
and views of parameters, are read again in the backward. So the parameters of a layer in host memory
are on the device in the layer's forward and in its backward. A barrier lets a fetch begin when the
segment before begins: otherwise XLA could fetch all layers first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem._model.auto.segments import SegmentedLoss
from jaxmem._model.loop.layer import Residuals, forward
from jaxmem._model.loop.pullback import pulled
from jaxmem._model.states.shards import gathered
from jaxmem._model.states.store import brought, returned, streams
from jaxmem._trace.vary import zeros


class SegmentedRun:
    """A forward through the segments of a loss, and the backwards that read its saved tensors.

    value: the loss.
    reported: the arrays that the loss returns after the loss itself.
    """

    def __init__(
        self,
        loss: SegmentedLoss,
        components,
        leaves: list,
        arguments: Sequence,
        whole: Sequence[jax.ShapeDtypeStruct] | None,
        axis_name: str | None,
    ):
        """Runs the forward.

        components: the numbers of the parameters of each component.
        leaves: the parameters, in the memories where they are stored.
        arguments: the other arrays that the loss reads.
        whole: the shapes of the whole parameters, if `leaves` may be a device's parts; else None.
        axis_name: the mesh axis that divides parameters.
        """
        self.whole, self.axis = whole, axis_name
        self.segments, self.components, self.leaves = loss.segments, components, leaves
        self.output, self.frozen = loss.output, loss.frozen
        first = {i: k for k, s in reversed([*enumerate(loss.segments)]) for i in s.leaves}
        # The components whose gradients are complete when a segment has run backward. The gradient
        # of a parameter that no segment reads is zero.
        self.complete: list[list[int]] = [[] for _ in loss.segments]
        for c, numbers in enumerate(components):
            if numbers:
                self.complete[min(first.get(i, 0) for i in numbers)].append(c)
        self.saved: list[tuple[list, Residuals, list]] = []
        values = dict(zip(loss.inputs, arguments))
        self.made: list[dict[int, Any]] = []
        own = self._gathered(self._fetched(0, ()), arguments)
        for k, segment in enumerate(self.segments):
            values |= segment.rest(own, values)
            taken, others = ([values[v] for v in vs] for vs in (segment.takes, segment.others))
            following = self._gathered(self._fetched(k + 1, taken), taken)
            trained, still = self._apart(own)

            def call(own, x, _, segment=segment, names=(*trained, *still)):
                arrays = [*own[0], *own[1]]
                known = dict(zip(names, arrays))
                leaves = [known[i] for i in segment.leaves]
                return segment.call(leaves, x, arrays[len(names) :])

            given = [*trained.values()], [*still.values(), *others]
            made, saved, residuals = forward(call, given, taken, ((), ()), len(still))
            values |= dict(zip(segment.makes, made))
            self.saved.append((saved, residuals, others))
            self.made.append({v: jax.typeof(a) for v, a in zip(segment.makes, made)})
            own = following
        self.value = values[self.output]
        # XLA drops copies and gathers of parameters that no reported array reads.
        self.reported = loss.reported([*map(self._at_hand, range(len(leaves)))], values)

    def backward(self, seed, states: list[dict], use: Callable) -> list:
        """Runs the segments backward. Returns the results of `use` for the components.

        seed: the cotangent of the loss.
        states: the states of the components.
        use: `use(c, state, gradient)` uses the gradient of component c, whose state is in device
          memory.
        """
        used: list[Any] = [*states]
        cotangents, gradients = {self.output: seed}, {}
        last = len(self.segments) - 1
        ready = self._ready(last, states, (seed,))
        for k in range(last, -1, -1):
            segment, (own, parts, near) = self.segments[k], ready
            made = self.made[k]
            given = [
                zeros(a) if v not in cotangents else cotangents.pop(v) for v, a in made.items()
            ]
            ready = self._ready(k - 1, states, given)
            saved, residuals, others = self.saved[k]
            trained, still = self._apart(own)
            read = [*trained.values(), *still.values(), *others]
            pull = residuals.closure(read, saved, residuals.shared([]))
            # The pullbacks of layers are not read: their zeros are small.
            back = pulled if segment.layer is None else lambda pull, given: pull(given)
            d_own, d_taken, _ = back(pull, given)
            for into, names, found in (
                (gradients, trained, d_own),
                (cotangents, segment.takes, d_taken),
            ):
                for name, d in zip(names, found):
                    into[name] = into[name] + d if name in into else d
            now = {}
            for c, state in near.items():
                numbers = self.components[c]
                zero = lambda i: zeros(jax.typeof(brought(self.leaves[i])))
                gradient = [gradients.pop(i) if i in gradients else zero(i) for i in numbers]
                gradient = jax.lax.optimization_barrier(gradient)
                params = [parts.get(i, self.leaves[i]) for i in numbers]
                replaced = {"params": params} if "params" in states[c] else {}
                now[c] = use(c, state | replaced, gradient)
            # The barrier makes the next segment wait: these gradients are free before it runs.
            waits = jax.lax.optimization_barrier((cotangents, gradients, now))
            cotangents, gradients, now = waits
            for c, new in now.items():
                used[c] = returned(new, states[c]) if states[c] else new
        return used

    def _apart(self, own: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """The trained and the frozen parameters of a segment, by number."""
        of = lambda frozen: {i: a for i, a in own.items() if (i in self.frozen) == frozen}
        return of(False), of(True)

    def _fetched(self, k: int, after) -> dict[int, Any]:
        """The parameters of segment k in device memory, by number, when the arrays `after` exist.
        Otherwise XLA could cast the parameters of all segments first, and would find that the
        forward and the backward cast equal parameters, and store all casts.
        """
        numbers = self.segments[k].leaves if 0 <= k < len(self.segments) else ()
        ready, _ = jax.lax.optimization_barrier(([self.leaves[i] for i in numbers], after))
        return dict(zip(numbers, brought(ready)))

    def _at_hand(self, i: int):
        """A whole parameter in device memory."""
        a = brought(self.leaves[i])
        return a if self.whole is None else gathered(a, self.whole[i], str(self.axis))

    def _gathered(self, parts: dict[int, Any], after) -> dict[int, Any]:
        """The whole parameters of a segment. A device's parts are gathered
        when the arrays `after` exist. Otherwise XLA would find that the forward and the backward
        gather equal arrays, and store all of them.
        """
        if self.whole is None:
            return parts
        ready, _ = jax.lax.optimization_barrier((parts, after))
        return {i: gathered(a, self.whole[i], str(self.axis)) for i, a in ready.items()}

    def _ready(self, k: int, states: list[dict], after) -> tuple[dict, dict, dict]:
        """The arrays that the backward of segment k needs in device memory, by number: its whole
        parameters, and the device's parts of them; and the states of the components that it
        completes, without parameters.
        """
        complete = self.complete[k] if k >= 0 else []
        near = {c: {n: a for n, a in states[c].items() if n != "params"} for c in complete}
        parts = self._fetched(k, after)
        return self._gathered(parts, after), parts, _brought(near, after)


def _brought(tree, after):
    """Copies arrays in host memory to the device when the arrays `after` exist."""
    if not streams(tree):
        return tree
    tree, _ = jax.lax.optimization_barrier((tree, after))
    return brought(tree)
