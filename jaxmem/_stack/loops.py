"""The loops of a stack: one `jax.lax.scan` forward for each group of layers, and one backward that
makes a layer's gradient at a time and hands it on at once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._stack.layer import Residuals, forward
from jaxmem._tags.groups import Group

Into = Callable[[Any, Any, Any], Any]  # (state, i, gradient of layer i) -> state


@dataclasses.dataclass(frozen=True)
class Loops:
    """The forward and the backward loop of a stack, over all groups of its layers.

    layer: `layer(own, x, common) -> (x, aux)`, where `own` (one layer's arrays) and `common` (those
      that all layers read) are pairs: what is differentiated, and the rest.
    own: `own(stacked, i)` reads layer i's arrays, as such a pair.
    groups: the groups of layers, in order, each with its policy.
    """

    layer: Callable
    own: Callable
    groups: tuple[Group, ...]

    def plain(self, stacked, x, common):
        """Returns the output, and every layer's auxiliary output, stacked. Saves nothing: this runs
        where no gradient is asked for.
        """
        body = lambda x, i: self.layer(self.own(stacked, i), x, common)
        return jax.lax.scan(body, x, jnp.arange(self.groups[-1].stop))

    def forward(self, stacked, x, common):
        """Returns what `plain` does, and what `backward` needs, as a triple for each group: the
        arrays saved of its layers, stacked; the arrays that are the same in every layer; and the
        `Residuals` that say how the closures are rebuilt from both.
        """
        extras, saved = [], []
        for group in self.groups:
            policy: Any = group.policy
            # The loop keeps forward and backward apart, so no barrier against common-subexpression
            # elimination is needed.
            layer = jax.checkpoint(self.layer, policy=policy, prevent_cse=False)
            box: list[Residuals] = []  # one for each trace of `body`; the last trace runs

            def body(x, i, layer=layer, box=box):
                (x, extra), kept, residuals = forward(layer, self.own(stacked, i), x, common)
                box.append(residuals)
                return x, (extra, kept)

            x, (extra, kept) = jax.lax.scan(body, x, jnp.arange(group.start, group.stop))
            extras.append(extra)
            # What is shared is computed out here: as an output of the scan it would be stacked, a
            # copy for each layer.
            saved.append((kept, box[-1].shared(jax.tree.leaves(common)), box[-1]))
        return x, _joined(extras), saved

    def backward(self, stacked, saved, d_x, d_extra, d_common, state, into: Into):
        """Runs the layers backward, from the last to the first.

        Returns the cotangents of `x` and of `common[0]`, and `state` after
        `state = into(state, i, gradient)` for each layer i.

        stacked: the pair (stacked parameters, key), of which a layer's own arrays are read again.
        saved: what `forward` returned last.
        d_x, d_extra: the cotangents of the output, and of the stacked auxiliary outputs.
        d_common: zeros like `common[0]`, to which every layer's share is added.
        state: what gathers the layers' gradients: a buffer for all of them, or moments.
        into: puts a layer's gradient into `state`. A gradient is not referred to after it.
        """
        for group, (kept, shared, residuals) in reversed(list(zip(self.groups, saved))):
            # `state` is carried, so that XLA updates it in place. As a stacked output of the scan
            # it would be held twice.
            def body(carry, one, shared=shared, residuals=residuals):
                d_x, d_common, state = carry
                i, kept, d_extra = one
                pull = residuals.closure(jax.tree.leaves(self.own(stacked, i)), kept, shared)
                gradient, d_x, more = pull((d_x, d_extra))
                d_common = jax.tree.map(jnp.add, d_common, more)
                return (d_x, d_common, into(state, i, gradient)), None

            of_group = jax.tree.map(lambda a, g=group: a[g.start : g.stop], d_extra)
            xs = (jnp.arange(group.start, group.stop), kept, of_group)
            (d_x, d_common, state), _ = jax.lax.scan(body, (d_x, d_common, state), xs, reverse=True)
        return d_x, d_common, state


def _joined(parts):
    """Joins what the groups returned, stacked by layer, into one stack of all layers."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
