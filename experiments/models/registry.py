"""The models that a config may name. Each model is a module with `parts` and `split`, and with
`batch` if it trains on plain text.

A model is its arrays outside the layers and a function of a layer's number (`parts`). The function
draws each layer from a key of its own. A resident state is that function under `jax.vmap`, and a
placed state calls the function for one layer at a time. So both hold the same numbers by
construction.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config.text import CAUSAL, Config
from experiments.models import bert, gpt, llama
from experiments.models import glue as glue_model
from experiments.models.blocks import Layer
from experiments.models.sharding import constrain, gathered
from experiments.models.split import Split

MODELS: dict[str, types.ModuleType] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "bert_glue": glue_model,
}


def parts(config: Config, key) -> tuple[dict, Layer]:
    """Returns the parameters outside the layers, and the function of a layer's parameters."""
    return MODELS[config.model.kind].parts(config, key)


def create(config: Config, key) -> dict:
    """Returns all parameters, a nested dict. "blocks" are the layers' parameters, stacked along a
    leading axis.
    """
    outer, layer = parts(config, key)
    return outer | {"blocks": jax.vmap(layer)(jnp.arange(config.model.layers))}


def split(config: Config) -> Split:
    """Returns the model as three functions. If a mesh is set, the activations between them are
    divided by the rules of `sharding.py`.
    """
    found = MODELS[config.model.kind].split(config)
    between = "x_BSD, sequence" if config.mesh.sequence else "x_BSD"

    def placed(function: Callable[..., Any]) -> Callable[..., Any]:
        def divided(parameters, *args, **options):
            made = function(gathered(parameters), *args, **options)
            if isinstance(made, tuple):  # x, and values that layers share
                return constrain(made[0], between), *made[1:]
            return constrain(made, between)

        return divided

    head = lambda outer, x, batch: found.head(gathered(outer), constrain(x, "x_BSD"), batch)
    return dataclasses.replace(
        found, embed=placed(found.embed), layer=placed(found.layer), head=head
    )


def is_explicit(config: Config) -> bool:
    """Whether explicit axes of a mesh remain explicit inside the model's training step. The layers
    of BERT and of mixtures of experts have operands whose shardings disagree. A released step of
    several microbatches loops over rows of the batch, which devices divide.
    """
    divides = config.optimizer.accumulation == "released" and config.train.microbatches > 1
    return config.model.kind in CAUSAL and config.model.experts == 1 and not divides


def batch(config: Config, rows, step: int):
    """Returns the batch of step `step` from rows of text, int32 (B, S + 1). It is a function of the
    arguments only.
    """
    return MODELS[config.model.kind].batch(config, rows, config.train.seed, step)


def batch_shape(config: Config):
    """Returns the shapes of a training batch, of text or of examples."""
    if hasattr(MODELS[config.model.kind], "batch_shape"):
        return MODELS[config.model.kind].batch_shape(config)
    rows = np.zeros((config.train.batch, config.train.sequence + 1), np.int32)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch(config, rows, 0))
