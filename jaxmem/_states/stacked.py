"""Reads one layer of stacked arrays, replaces it in place, and folds a gradient into it."""

from collections.abc import Callable
from typing import Any

import jax


def at(tree, i):
    """Layer `i` of a tree of stacked arrays."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def put(tree, layer, i):
    """`tree` with layer `i` replaced by `layer`, in the dtypes of `tree`; XLA updates in place
    where nothing else reads the old arrays.
    """
    update = lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new.astype(a.dtype), i, 0)
    return jax.tree.map(update, tree, layer)


def folded_at(fold: Callable[[Any, Any], Any], state, i, gradient):
    """Replaces layer `i` of `state` by `fold(layer, gradient)`.

    The layer is read behind a barrier, when the gradient exists. Without it XLA reads a layer's
    moments together with its parameters, and holds both through the layer's backward.

    fold: a function of one layer of `state` and a gradient, which returns the new layer.
    state: a tree of arrays with a leading axis of layers.
    i: the layer's index.
    gradient: a tree of arrays, as `fold` takes it.
    """
    i, gradient = jax.lax.optimization_barrier((i, gradient))
    return put(state, fold(at(state, i), gradient), i)
