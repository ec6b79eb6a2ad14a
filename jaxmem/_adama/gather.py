"""Gathers a released step's parameters where each device holds a part of them, and updates them
where each device holds a part of their moments.
"""

from typing import Any

import jax
import optax

from jaxmem._adama.model import Model
from jaxmem._adama.rule import Rule
from jaxmem._adama.transform import AdamAState
from jaxmem._states.shards import assembled, gathered, part_of, refilled


def whole(model: Model, params, like, axis_name: str | None):
    """The parameters with the shapes of `like`: gathered where each device has a part of them.

    What is gathered is converted to the layers' dtype before, so that fewer bytes cross between
    devices. The layers are gathered one at a time.
    """
    if all(a.shape == b.shape for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(like))):
        return params
    assert axis_name is not None, "arrays are parts, and there is no axis"

    def one(a, like):
        if a.shape == like.shape:
            return a
        return gathered(a if model.dtype is None else a.astype(model.dtype), like, axis_name)

    leaves, structure = jax.tree.flatten(params[model.layers])
    stacked = assembled(leaves, jax.tree.leaves(like[model.layers]), axis_name, model.dtype)
    layers = jax.tree.unflatten(structure, stacked)
    return {
        k: layers if k == model.layers else jax.tree.map(one, v, like[k]) for k, v in params.items()
    }


def updated(layers: str, rule: Rule, params, state: AdamAState):
    """Returns (params, state) after a minibatch: each device updates the part of the parameters for
    which it has moments, and what every device holds whole is gathered again (ZeRO-1).

    The moments need no reduction here: what was folded into them was the mean over devices.
    """
    assert rule.axis_name is not None, "arrays are parts, and there is no axis"
    axis: str = rule.axis_name
    mine = jax.tree.map(lambda p, m: part_of(p, m, axis), params, state.mu)
    new: Any = optax.apply_updates(mine, rule.updates(state.mu, state.nu, state.count, mine))
    outer = {
        k: jax.tree.map(lambda a, p: gathered(a, p, axis), new[k], v)
        for k, v in params.items()
        if k != layers
    }
    stacked = refilled(params[layers], new[layers], axis)
    params = {k: stacked if k == layers else outer[k] for k in params}
    return params, state._replace(count=optax.safe_increment(state.count))
