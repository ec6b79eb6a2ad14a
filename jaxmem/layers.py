"""Layers for `jaxmem.stack`: parameters stacked and taken apart, and Flax modules as functions of
theirs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.errors import StackError


def stacked(layers: Sequence):
    """Stacks L layers' trees of equal structure, shapes and dtypes into one tree, whose arrays have
    a leading axis L.

    Raises StackError if a layer differs from the first, naming both.
    """
    if not layers:
        raise StackError(
            "stacked: `layers` is empty; expected the parameters of at least one layer"
        )
    first = jax.tree.leaves_with_path(layers[0])
    for i, layer in enumerate(layers):
        if (got := jax.tree.structure(layer)) != (expected := jax.tree.structure(layers[0])):
            raise StackError(
                f"stacked: layer {i} of `layers` is {got}, and layer 0 {expected}; expected the"
                " same tree"
            )
        for (path, a), b in zip(first, jax.tree.leaves(layer)):
            if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
                raise StackError(
                    f"stacked: `{jax.tree_util.keystr(path)}` of layer {i} is"
                    f" {jax.typeof(b).str_short()}, and of layer 0"
                    f" {jax.typeof(a).str_short()}; expected the same shape and dtype: layers that"
                    " differ cannot be one loop"
                )
    return jax.tree.map(lambda *a: jnp.stack(a), *layers)


def unstacked(params) -> list:
    """Returns the L trees of which `params` is stacked."""
    count = jax.tree.leaves(params)[0].shape[0]
    return [jax.tree.map(lambda a, i=i: a[i], params) for i in range(count)]


def linen(module, *, collection: str = "params", rng: str = "dropout"):
    """Returns a `flax.linen` module as `block(params, x, *shared, key=None)` of its own parameters.

    module: the module of one layer, called with `x` and what all layers share.
    collection: the collection of variables that `params` is.
    rng: the random stream that `key` becomes.

    The block raises StackError if the module changes a variable, as BatchNorm does.
    """

    def block(params, x, *shared, key=None):
        # All collections are mutable, so that a change is seen here and not refused by Flax.
        streams = {} if key is None else {rng: key}
        out, changed = module.apply({collection: params}, x, *shared, rngs=streams, mutable=True)
        if changed := _changed(changed, {collection: params}):
            raise StackError(
                f"linen: module {type(module).__name__} changes {changed} when it runs; a loop over"
                " layers hands on `x`"
                " alone: return what changes with has_aux=True, or leave it out of the layers"
            )
        return out

    return block


def nnx(graphdef):
    """Returns a `flax.nnx` module as `block(state, x, *shared, key=None)` of its own state.

    graphdef: the module's graph, from `graphdef, state = nnx.split(module)`.

    `key` is given to the module as `rngs=nnx.Rngs(key)`. The block raises StackError if the module
    changes its state, as BatchNorm or a Dropout with a stream of its own does.
    """
    from flax import nnx

    def block(state, x, *shared, key=None):
        before = nnx.to_pure_dict(state)  # the module's variables may be these very ones
        module = nnx.merge(graphdef, state)
        out = module(x, *shared, **({} if key is None else {"rngs": nnx.Rngs(key)}))
        if changed := _changed(nnx.to_pure_dict(nnx.state(module)), before):
            raise StackError(
                f"nnx: the module changes its {changed} when it runs; a loop over layers hands on"
                " `x` alone: give it"
                " `key`, return what changes with has_aux=True, or leave it out of the layers"
            )
        return out

    return block


def _changed(after: Any, before: Any) -> str:
    """The paths of what is new, or is another array, in `after`."""
    # By identity, since values are not known while a step is traced.
    known = {jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(before)}
    new = {jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(after)}
    return ", ".join(path for path, a in new.items() if known.get(path) is not a)
