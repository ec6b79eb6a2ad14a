"""A model as three functions: embed, one layer, head. Every training step here calls them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from experiments.models.loops import Loop, scanned


@dataclasses.dataclass(frozen=True)
class Split:
    """Parameters are a dict. "blocks" are the layers' parameters, stacked along a leading axis L;
    the other parameters are `outer`.

    `embed(outer, batch, key=None) -> x`, or a tuple of x and values that layers share;
    `layer(p_i, x, *shared, key=None) -> x`; `head(outer, x, batch) -> mean loss`. These are the
    arguments of `jaxmem.released_step`. A key enables dropout. `scores(outer, x) -> logits` of each
    position's next token; None for a model that is not causal.
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]
    scores: Callable[..., Any] | None = None


def whole(split: Split, loop: Loop | None = None):
    """Returns loss(params, batch, key=None), with the layers in a loop of `loops.py`."""
    loop = loop or scanned()

    def loss(params, batch, key=None):
        outer, x = _through(split, loop, params, batch, key)
        return split.head(outer, x, batch)

    return loss


def next_scores(split: Split, loop: Loop | None = None):
    """Returns scores(params, batch, position) -> (B, V), the logits of the token after it."""
    loop = loop or scanned()

    def scores(params, batch, position):
        outer, x_BSD = _through(split, loop, params, batch)
        x_B1D = jax.lax.dynamic_slice_in_dim(x_BSD, position, 1, axis=1)
        assert split.scores is not None, "the config refuses such a model"
        return split.scores(outer, x_B1D)[:, 0]

    return scores


def _through(split: Split, loop: Loop, params, batch, key=None):
    """Returns the parameters outside the layers, and the output of the last layer."""
    outer = {name: value for name, value in params.items() if name != "blocks"}
    layers = len(jax.tree.leaves(params["blocks"])[0])
    own = {} if key is None else {"key": jax.random.fold_in(key, layers)}  # layer i folds in i
    x = split.embed(outer, batch, **own)
    x, *shared = x if isinstance(x, tuple) else (x,)
    return outer, loop(split.layer, params["blocks"], x, key, *shared)
