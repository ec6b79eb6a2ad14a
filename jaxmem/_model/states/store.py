"""Reads a layer of stacked arrays, and replaces it in place. The arrays are stored in device memory
or in pinned host memory. A loop copies a layer from host memory one iteration ahead.

Four rules keep these copies fast. No compiler documents them, and each costs a day to find again:

- A layer's index is a counter in the loop's own carry. From an index that is read as data, such as
  an element of `jnp.arange`, XLA cannot derive the offset, and reads host memory by a kernel on the
  multiprocessors in place of a DMA copy. Negative indices are excluded for the same reason.
- The next layer is read before the current layer is written (`after`). Otherwise XLA copies the
  whole host stack in every iteration, since the write would precede a read of the stack.
- An updated stack is read from the loop's carry. If it is read from outside the loop, it is stored
  twice.
- An updated layer keeps the axis of layers, of length 1, from reading to writing, and is multiplied
  by arrays, not by numbers alone (`folded_at`, `Accumulation`). Otherwise XLA copies the layer
  before it updates the layer, in device memory too: two more passes over each array, and memory for
  the copies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._trace.arguments import on_host

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def _on_host(a) -> bool:
    """Whether an array, traced or not, is stored in host memory."""
    return on_host(jax.typeof(a))


def streams(tree) -> bool:
    """Whether any array of a tree is stored in host memory."""
    return any(map(_on_host, jax.tree.leaves(tree)))


def fetch(tree, i):
    """Returns layer `i` of a tree of stacked arrays, in device memory. `i` is at least 0. If `i` is
    beyond the last layer, the result is the last layer.
    """
    return jax.tree.map(lambda a: _fetch(a, i), tree)


def _fetch(a, i):
    """Returns layer `i` of one stacked array, in device memory."""
    if a.shape[0] == 1 and _on_host(a):  # not a loop for XLA: a kernel would read the slice
        return jax.device_put(a, _DEVICE)[0]
    layer = jax.lax.dynamic_index_in_dim(a, i, keepdims=False, allow_negative_indices=False)
    return jax.device_put(layer, _DEVICE) if _on_host(a) else layer


def brought(tree):
    """Copies whole arrays to device memory."""
    return jax.tree.map(lambda a: jax.device_put(a, _DEVICE) if _on_host(a) else a, tree)


def returned(tree, like):
    """Copies whole arrays to the memories of the arrays of `like`. None remains None."""
    move = lambda b, a: jax.device_put(a, _HOST) if a is not None and _on_host(b) else a
    return jax.tree.map(move, like, tree)


def ahead(tree, i) -> list:
    """Prefetches layer `i`: copies its arrays in host memory to the device one iteration ahead.

    The result has an entry for each leaf of `tree`. The entry is () if the leaf is stored in device
    memory. `i` may be one beyond either end of the stack.
    """
    return [_fetch(a, i) if _on_host(a) else () for a in jax.tree.leaves(tree)]


def taken(tree, held: list, i):
    """Returns layer `i`. `held` are the prefetched arrays that `ahead` returned for it."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, held, strict=True)
    return jax.tree.unflatten(structure, [h if _on_host(a) else _fetch(a, i) for a, h in pairs])


def after(layer, held: list):
    """Returns `layer` behind a barrier: its arrays exist only after all of them are computed and
    all prefetched arrays `held` of another layer are read. XLA then prefetches early, and does not
    fetch one array at a time just before its use.
    """
    return jax.lax.optimization_barrier((layer, held))[0]


def put(tree, layer, i):
    """Returns `tree` with layer `i` replaced by `layer`, in the dtypes and the memory of `tree`.
    XLA updates in place if nothing else reads the old arrays.
    """

    def one(a, new):
        new = new.astype(a.dtype)
        if a.shape[0] == 1 and _on_host(a):
            return jax.device_put(new[None], _HOST)
        new = jax.device_put(new, _HOST) if _on_host(a) else new
        return jax.lax.dynamic_update_index_in_dim(a, new, i, 0, allow_negative_indices=False)

    return jax.tree.map(one, tree, layer)


def counted(body: Callable, carry, xs, start, count: int, *, step: int = 1, reverse: bool = False):
    """Runs `jax.lax.scan` over `count` layers from `start` on. The index of a layer is a counter in
    the loop's carry.

    body: `body(carry, i, x) -> (carry, y)`, for layer i.
    carry: the carry of the first iteration.
    xs: a tree of arrays with an entry for each of these layers, or None.
    start: the first layer; may be traced.
    count: the number of iterations.
    step: the distance of the layers of two iterations.
    reverse: whether the loop runs from the last layer to the first. `xs` and the stacked results
      have the order of the layers in any case.
    """
    change = -step if reverse else step

    def one(counter_and_carry, x):
        i, carry = counter_and_carry
        carry, y = body(carry, i, x)
        return (i + change, carry), y

    first: Any = jnp.int32(start + step * (count - 1) if reverse else start)
    (_, carry), ys = jax.lax.scan(one, (first, carry), xs, length=count, reverse=reverse)
    return carry, ys
