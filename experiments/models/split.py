"""A model as three functions, which every training step here is made of: embed, one layer, head."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from experiments.models.loops import Loop, scanned


@dataclasses.dataclass(frozen=True)
class Split:
    """Parameters are a dict: "blocks", the layers', stacked along a leading axis L; the others are
    `outer`.

    `embed(outer, batch, key=None) -> x`, or a tuple of x and what layers share; `layer(p_i, x,
    *shared, key=None) -> x`;
    `head(outer, x, batch) -> mean loss`. The forms that `jaxmem.released_step` takes. A key means
    dropout.
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]


def whole(split: Split, loop: Loop | None = None):
    """loss(params, batch, key=None) with the layers under any loop of `loops.py`."""
    loop = loop or scanned()

    def loss(params, batch, key=None):
        outer = {name: value for name, value in params.items() if name != "blocks"}
        layers = len(jax.tree.leaves(params["blocks"])[0])
        own = {} if key is None else {"key": jax.random.fold_in(key, layers)}  # layer i has i's
        x = split.embed(outer, batch, **own)
        x, *shared = x if isinstance(x, tuple) else (x,)
        return split.head(outer, loop(split.layer, params["blocks"], x, key, *shared), batch)

    return loss
