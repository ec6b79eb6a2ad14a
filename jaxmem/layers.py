"""Helpers for `jaxmem.stack`: stacked parameters, and Flax modules as functions of parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._model.loop import arguments
from jaxmem.errors import StackError


def stacked(layers: Sequence):
    """Stacks the parameters of L layers into one tree, whose arrays have a leading axis L.

    layers: a sequence of L trees with equal structure, shapes and dtypes.

    Raises StackError if `layers` is empty or no sequence, or if a layer differs from layer 0. The
    message names the layer and the difference.
    """
    if not isinstance(layers, Sequence) or not layers:
        got = "empty" if isinstance(layers, Sequence) else type(layers).__name__
        raise StackError(
            f"stacked: `layers` is {got}; expected a list of the parameters of at least one layer"
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
                    f" {jax.typeof(b).str_short()}, and of layer 0 {jax.typeof(a).str_short()};"
                    " expected the same shape and dtype: layers that differ cannot be one loop"
                )
    return jax.tree.map(lambda *a: jnp.stack(a), *layers)


def unstacked(params) -> list:
    """Splits stacked parameters into a list of L trees, one per layer.

    params: a tree of arrays with a leading axis L.

    Raises StackError if `params` has no array, or arrays without one leading axis for all.
    """
    count = arguments.lengths_of(params)[0]
    return [jax.tree.map(lambda a, i=i: a[i], params) for i in range(count)]


def linen(module, *, collection: str = "params", rng: str = "dropout"):
    """Makes a function `block(params, x, *shared, key=None)` from a `flax.linen` module.

    module: the module of one layer. The block calls the module with `x` and with the arrays that
      all layers share.
    collection: the name of the variable collection that `params` holds.
    rng: the name of the random stream that receives `key`.

    The block raises StackError if the module changes a variable when it runs, as BatchNorm does.
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
    """Makes a function `block(state, x, *shared, key=None)` from a `flax.nnx` module.

    graphdef: the graph of the module, from `graphdef, state = nnx.split(module)`.

    If the block receives a key, the block calls the module with `rngs=nnx.Rngs(key)`. The block
    raises StackError if the module changes its state when it runs, as BatchNorm does, or a Dropout
    with a random stream of its own.
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
    """The paths of leaves of `after` that are new, or are other arrays than in `before`."""
    # By identity, since values are not known while a step is traced.
    known = {jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(before)}
    new = {jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(after)}
    return ", ".join(path for path, a in new.items() if known.get(path) is not a)
