"""The models that a config may name: each a module with `parts` and `split`, and `batch` if it
trains on plain text.

A model is its arrays outside the layers and a function of a layer's number (`parts`). The function
draws each layer from a key of its own. A resident state is that function under `jax.vmap`, and a
placed state calls the function for one layer at a time. So both hold the same numbers by
construction.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config.text import Config
from experiments.models import bert, gpt, llama
from experiments.models import glue as glue_model
from experiments.models.blocks import Layer
from experiments.models.split import Split

MODELS: dict[str, types.ModuleType] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "bert_glue": glue_model,
}


def parts(config: Config, key) -> tuple[dict, Layer]:
    """The parameters outside the layers, and those of each layer by its number."""
    return MODELS[config.model.kind].parts(config, key)


def create(config: Config, key) -> dict:
    """All parameters, a nested dict: "blocks", the layers', have a leading axis."""
    outer, layer = parts(config, key)
    return outer | {"blocks": jax.vmap(layer)(jnp.arange(config.model.layers))}


def split(config: Config) -> Split:
    return MODELS[config.model.kind].split(config)


def batch(config: Config, rows, step: int):
    """What the model trains on, of rows of text, int32 (B, S + 1): step `step`'s, the same whatever
    came before.
    """
    return MODELS[config.model.kind].batch(config, rows, config.train.seed, step)


def batch_shape(config: Config):
    """The same as shapes; of a model that trains on examples, the shapes of a batch of them."""
    if hasattr(MODELS[config.model.kind], "batch_shape"):
        return MODELS[config.model.kind].batch_shape(config)
    rows = np.zeros((config.train.batch, config.train.sequence + 1), np.int32)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch(config, rows, 0))
