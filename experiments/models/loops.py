"""Loops over a model's layers with stacked parameters: x = layer(parameters of layer i, x, *shared,
key=key of layer i).

`scanned` is `jax.lax.scan` over `jax.checkpoint`, with any policy; `stacked` is `jaxmem.stack`.
"""

from collections.abc import Callable
from typing import Any

import jax

import jaxmem

Loop = Callable[..., Any]  # (layer, stacked parameters, x, key or None, *shared by layers) -> x


def stacked(plan=None) -> Loop:
    """Returns `jaxmem.stack` under a plan, which may have separate actions for groups of layers."""
    return lambda layer, parameters, x, key, *shared: jaxmem.stack(
        layer, parameters, x, *shared, key=key, plan=plan
    )


def scanned(policy=None, every: int = 1) -> Loop:
    """Returns `jax.lax.scan` with `policy` for each layer's checkpoint.

    `every` k: `policy` applies to layers 0, k, 2k and so on of the first k * (L // k) layers; the
    other layers keep everything.
    """

    def loop(layer, parameters, x, key, *shared):
        count = len(jax.tree.leaves(parameters)[0])

        def body(x, parameters, index):
            own = {} if key is None else {"key": jax.random.fold_in(key, index)}
            return layer(parameters, x, *shared, **own)

        once = every == count  # without a loop, XLA could merge the recomputation with the forward
        under = lambda policy: jax.checkpoint(body, policy=policy, prevent_cse=once and every > 1)
        layers = parameters, jax.numpy.arange(count, dtype="uint32")
        if every == 1:
            return _over(under(policy), x, layers)
        return _over_groups(under(policy), under(jaxmem.remat_policy(None)), every, x, layers)

    return loop


def _over(layer, x, layers):
    """Applies `x = layer(x, *one)` for each `one` of `layers`, a tree with a leading axis."""
    return jax.lax.scan(lambda x, one: (layer(x, *one), None), x, layers)[0]


def _over_groups(first, other, size: int, x, layers):
    """Applies layers in groups of `size`: `first` to the first layer of each group, `other` to the
    other layers and to the layers after the last whole group.

    The loop runs over groups, and the layers of a group are unrolled. An inner loop would store the
    saved tensors of a group twice.
    """
    count = len(jax.tree.leaves(layers)[0]) // size
    part = lambda start, stop: jax.tree.map(lambda a: a[start:stop], layers)
    groups = jax.tree.map(lambda a: a.reshape(count, size, *a.shape[1:]), part(0, count * size))

    def group(x, one):
        for i in range(size):
            x = (other if i else first)(x, *jax.tree.map(lambda a, i=i: a[i], one))
        return x, None

    x, _ = jax.lax.scan(group, x, groups)
    return _over(other, x, part(count * size, None))
