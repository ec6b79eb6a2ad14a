"""One layer of stacked arrays: read, replaced in place, folded with its gradient."""

from collections.abc import Callable
from typing import Any

import jax


def at(tree, i):
    """Layer `i` of a tree of stacked arrays."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def put(tree, layer, i):
    """`tree` with layer `i` replaced, in place where XLA may."""
    update = lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new.astype(a.dtype), i, 0)
    return jax.tree.map(update, tree, layer)


def folded_at(fold: Callable[[Any, Any], Any], state, i, gradient):
    """`state` with its layer `i` folded with a gradient, which must exist before the layer is read.

    Without the barrier XLA reads a layer's moments together with its parameters, and holds both
    through its backward.
    """
    i, gradient = jax.lax.optimization_barrier((i, gradient))
    return put(state, fold(at(state, i), gradient), i)
