"""Loops over a model's layers: x = layer(parameters of layer i, x, *shared, key=layer i's), for
stacked parameters.

`scanned` is `jax.lax.scan` round `jax.checkpoint`, which any policy goes with; `stacked` is
jaxmem's own loop.
"""

from collections.abc import Callable
from typing import Any

import jax

import jaxmem

Loop = Callable[..., Any]  # (layer, stacked parameters, x, key or None, *what layers share) -> x


def stacked(plan=None) -> Loop:
    """`jaxmem.stack` under a plan, which may decide groups of layers apart."""
    return lambda layer, parameters, x, key, *shared: jaxmem.stack(
        layer, parameters, x, *shared, key=key, plan=plan
    )


def scanned(policy=None, every: int = 1) -> Loop:
    """`jax.lax.scan` with `policy` for each layer's checkpoint.

    `every` k: `policy` governs layers 0, k, 2k and so on of the first k * (L // k); the others keep
    everything.
    """

    def loop(layer, parameters, x, key, *shared):
        count = len(jax.tree.leaves(parameters)[0])

        def body(x, parameters, index):
            own = {} if key is None else {"key": jax.random.fold_in(key, index)}
            return layer(parameters, x, *shared, **own)

        once = (
            every == count
        )  # no loop is left to keep XLA from taking recomputation for repetition
        under = lambda policy: jax.checkpoint(body, policy=policy, prevent_cse=once and every > 1)
        layers = parameters, jax.numpy.arange(count, dtype="uint32")
        if every == 1:
            return _over(under(policy), x, layers)
        return _over_groups(under(policy), under(jaxmem.remat_policy(None)), every, x, layers)

    return loop


def _over(layer, x, layers):
    """`x = layer(x, *one)` for each one of `layers`, a tree with a leading axis."""
    return jax.lax.scan(lambda x, one: (layer(x, *one), None), x, layers)[0]


def _over_groups(first, other, size: int, x, layers):
    """The same in groups of `size`: `first` for a group's first layer, `other` for its others and
    for what is left.

    A loop over groups, whose layers are spelled out: a loop within it would hold what a group keeps
    twice.
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
