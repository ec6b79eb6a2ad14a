"""Reads a layer of stacked arrays, and replaces it in place, wherever the arrays lie: in device
memory, or in pinned host memory, from which a layer is copied before its turn in a loop comes.

Four rules keep such copies fast, and no compiler states them. Each costs a day to find again:

- A layer's index is a counter in the loop's own carry. From an index that is read as data, such as
  an element of `jnp.arange`, XLA cannot tell the offset, and reads host memory by a kernel on the
  multiprocessors in place of a DMA copy. Negative indices are excluded for the same reason.
- The next layer is read before this one is written (`after`). Else XLA copies the whole host stack
  in every turn of the loop, since it would write what is still to be read.
- What is updated is read from the loop's carry. If it is read from outside, it is held twice.
- What is updated keeps, from reading to writing, the axis of layers, of length 1, and is multiplied
  by arrays, not by numbers alone (`folded_at`, `Gathering`). Else XLA copies the layer, in device
  memory too, before it updates it: two passes more over each array, and room for the copies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._trace.arguments import on_host

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def _on_host(a) -> bool:
    """Whether an array, traced or not, lies in host memory."""
    return on_host(jax.typeof(a))


def streams(tree) -> bool:
    """Whether any array of a tree lies in host memory."""
    return any(map(_on_host, jax.tree.leaves(tree)))


def fetch(tree, i):
    """Layer `i` of a tree of stacked arrays, in device memory. `i` is at least 0; beyond the last
    layer it is the last layer's.
    """
    return jax.tree.map(lambda a: _fetch(a, i), tree)


def _fetch(a, i):
    if a.shape[0] == 1 and _on_host(a):  # XLA knows no loop here: a slice would be a kernel's
        return jax.device_put(a, _DEVICE)[0]
    layer = jax.lax.dynamic_index_in_dim(a, i, keepdims=False, allow_negative_indices=False)
    return jax.device_put(layer, _DEVICE) if _on_host(a) else layer


def brought(tree):
    """Whole arrays in device memory."""
    return jax.tree.map(lambda a: jax.device_put(a, _DEVICE) if _on_host(a) else a, tree)


def returned(tree, like):
    """Whole arrays in the memory of those of `like`; None stays None."""
    move = lambda b, a: jax.device_put(a, _HOST) if a is not None and _on_host(b) else a
    return jax.tree.map(move, like, tree)


def ahead(tree, i) -> list:
    """What a loop holds of layer `i` before that layer's turn: its arrays that lie in host memory.

    The result has an entry for each leaf of `tree`, which is () where the leaf lies in device
    memory. `i` may be one beyond either end of the stack.
    """
    return [_fetch(a, i) if _on_host(a) else () for a in jax.tree.leaves(tree)]


def taken(tree, held: list, i):
    """Layer `i`, of which `ahead` returned what is `held`."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, held, strict=True)
    return jax.tree.unflatten(structure, [h if _on_host(a) else _fetch(a, i) for a, h in pairs])


def after(layer, held: list):
    """`layer`, all arrays of which exist only once all of them are computed and all that is `held`
    of another layer was read. XLA fetches what they are made of early then, and not an array at a
    time just before it is needed.
    """
    return jax.lax.optimization_barrier((layer, held))[0]


def put(tree, layer, i):
    """`tree` with layer `i` replaced by `layer`, in the dtypes and the memory of `tree`; XLA
    updates in place where nothing else reads the old arrays.
    """

    def one(a, new):
        new = new.astype(a.dtype)
        if a.shape[0] == 1 and _on_host(a):
            return jax.device_put(new[None], _HOST)
        new = jax.device_put(new, _HOST) if _on_host(a) else new
        return jax.lax.dynamic_update_index_in_dim(a, new, i, 0, allow_negative_indices=False)

    return jax.tree.map(one, tree, layer)


def counted(body: Callable, carry, xs, start: int, stop: int, *, reverse: bool = False):
    """`jax.lax.scan` over the layers from `start` to `stop`, with a layer's index as a counter of
    the loop's carry.

    body: `body(carry, i, x) -> (carry, y)`, for layer i.
    carry: what the first turn is given.
    xs: a tree of arrays with an entry for each of these layers, or None.
    start, stop: the first layer, and the one after the last.
    reverse: from the last layer to the first. `xs` and the stacked results keep the layers' order.
    """
    step = -1 if reverse else 1

    def one(counter_and_carry, x):
        i, carry = counter_and_carry
        carry, y = body(carry, i, x)
        return (i + step, carry), y

    first: Any = jnp.int32(stop - 1 if reverse else start)
    (_, carry), ys = jax.lax.scan(one, (first, carry), xs, length=stop - start, reverse=reverse)
    return carry, ys
