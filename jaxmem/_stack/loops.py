"""The loops of a stack: layers forward, group by group, and backward, one layer's gradient at a
time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._stack.groups import Group
from jaxmem._stack.layer import Residuals, forward

Into = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Loops:
    """`layer(own, x, common) -> (x, aux)` over groups of layers, with `own(stacked, i)` of layer i.

    `own` and `common` are pairs: what is differentiated, and the rest.
    """

    layer: Callable
    own: Callable
    groups: tuple[Group, ...]

    def plain(self, stacked, x, common):
        """The output, and every layer's auxiliary output, stacked. Nothing is saved."""
        body = lambda x, i: self.layer(self.own(stacked, i), x, common)
        return jax.lax.scan(body, x, jnp.arange(self.groups[-1].stop))

    def forward(self, stacked, x, common):
        """The same; then, by group, what its plan saves of each layer and once for all, and how to
        go back from it.
        """
        extras, saved = [], []
        for group in self.groups:
            policy: Any = group.policy
            layer = jax.checkpoint(self.layer, policy=policy, prevent_cse=False)
            box: list[Residuals] = []

            def body(x, i, layer=layer, box=box):
                (x, extra), kept, residuals = forward(layer, self.own(stacked, i), x, common)
                box.append(residuals)
                return x, (extra, kept)

            x, (extra, kept) = jax.lax.scan(body, x, jnp.arange(group.start, group.stop))
            extras.append(extra)
            saved.append((kept, box[-1].shared(jax.tree.leaves(common)), box[-1]))
        return x, _joined(extras), saved

    def backward(self, stacked, saved, d_x, d_extra, d_common, state, into: Into):
        """Cotangents of `x` and `common[0]`, and `state` after `state = into(state, i, gradient)`
        for each layer i.

        `d_common`: zeros.
        """
        for group, (kept, shared, residuals) in reversed(list(zip(self.groups, saved))):

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
    """What groups of layers give, as one."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
