"""Gathers a released step's parameters where each device holds a part of them, and updates them
where each device holds a part of their moments.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxmem._model.states.layout import like as as_layers
from jaxmem._model.states.layout import masters_of, one_layer, parts_of
from jaxmem._model.states.shards import assembled, gathered, part_of, refilled
from jaxmem._optim.adama.rule import Rule
from jaxmem._optim.adama.transform import State, with_moments
from jaxmem._optim.released.model import Model


def whole(model: Model, params, like, axis_name: str | None):
    """Returns the parameters with the shapes of `like`. Parameters that are divided over the
    devices are gathered.

    Parts are converted to the layers' dtype before they are gathered, so that devices exchange
    fewer bytes. The layers are gathered one at a time.
    """
    if all(a.shape == b.shape for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(like))):
        return params
    assert axis_name is not None, "arrays are parts, and there is no axis"

    def stack(part, like):
        leaves, structure = jax.tree.flatten(part)
        filled = assembled(leaves, jax.tree.leaves(like), axis_name, model.dtype)
        return jax.tree.unflatten(structure, filled)

    # One stack at a time, since stacks have different numbers of layers.
    layers = params[model.layers]
    stacks = map(stack, parts_of(layers), parts_of(like[model.layers]))
    return {
        **whole_outside(model, params, like, axis_name),
        model.layers: as_layers(layers, stacks),
    }


def whole_outside(model: Model, params, like, axis_name: str | None):
    """Returns `params` with the parameters outside the layers gathered as by `whole`."""
    return {
        k: v if k == model.layers else _whole(model, v, like[k], axis_name)
        for k, v in params.items()
    }


def whole_layer(model: Model, like, axis_name: str | None) -> Callable[[Any], Any]:
    """Returns a function that gathers one layer's parameters, which are divided over the devices
    (ZeRO-3).

    like: the parameters with their whole shapes.
    """
    one = one_layer(masters_of(like[model.layers])[0])
    return lambda layer: _whole(model, layer, one, axis_name)


def _whole(model: Model, tree, like, axis_name: str | None):
    """Returns `tree` with the shapes of `like`. Gathered arrays have the layers' dtype."""

    def one(a, like):
        if a.shape == like.shape:
            return a
        assert axis_name is not None, "arrays are parts, and there is no axis"
        return gathered(a if model.dtype is None else a.astype(model.dtype), like, axis_name)

    return jax.tree.map(one, tree, like)


def of_layers(layers: str, params) -> tuple[bool, ...]:
    """Returns for each array whether it is one of the layers' stacks."""
    found = jax.tree.leaves_with_path(params)
    return tuple(path[0] == jax.tree_util.DictKey(layers) for path, _ in found)


def updated(layers: str, rule: Rule, params, like, state: State):
    """Returns (params, state) after a minibatch. Each device updates the part of the parameters for
    which it has moments. Parameters that every device stores whole are gathered again (ZeRO-1).

    like: the parameters with their whole shapes.

    The moments need no reduction: the mean gradient over devices was folded into them.
    """
    assert rule.axis_name is not None, "arrays are parts, and there is no axis"
    axis: str = rule.axis_name
    mine = jax.tree.map(lambda p, m: part_of(p, m, axis), params, state.mu)
    stacked = of_layers(layers, params)
    moments, nu = rule.settled(state.moments, state.count, like, stacked)
    new: Any = optax.apply_updates(mine, rule.updates(moments.mu, nu, state.count, mine))
    outer = {
        k: jax.tree.map(lambda a, p: gathered(a, p, axis), new[k], v)
        for k, v in params.items()
        if k != layers
    }
    pairs = zip(parts_of(params[layers]), parts_of(new[layers]))
    stacked = as_layers(params[layers], [refilled(*pair, axis) for pair in pairs])
    params = {k: stacked if k == layers else outer[k] for k in params}
    counted = state._replace(count=optax.safe_increment(state.count))
    return params, with_moments(counted, moments)
