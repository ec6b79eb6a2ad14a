"""BERT with GLUE's head: a tanh layer and a linear layer compute one score, or a score for each
class, from the first position.

The head has no dropout, since the head of a released step gets no key.

Shapes: B batch, S sequence, D width, K outputs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.config.glue import GlueConfig
from experiments.config.glue_tasks import TASKS, Task
from experiments.data.tokens import PAD
from experiments.errors import InputError
from experiments.models import bert
from experiments.models.blocks import Layer, linear, parameter_dtype, pure
from experiments.models.split import Split, whole

ENCODER = ("embedding", "positions", "segments", "first", "blocks")


def parts(config: GlueConfig, key) -> tuple[dict, Layer]:
    """Returns random parameters outside the layers (BERT's encoder, `pooler`, `classifier`), and
    the function of a layer's parameters.
    """
    encoder_key, head_key = jax.random.split(key)
    model, rngs = config.model, nnx.Rngs(params=head_key)
    dense = lambda fan_out: pure(linear(model, model.width, fan_out, rngs))
    head = {"pooler": dense(model.width), "classifier": dense(TASKS[config.data.task].outputs)}
    outer, layer = bert.parts(config, encoder_key)
    return {name: outer[name] for name in ENCODER if name != "blocks"} | head, layer


def onto(params: dict, pretrained: dict) -> dict:
    """Returns `params` with a copy of the encoder of `pretrained`, a BERT's parameters."""

    def copied(path, own, given):
        if own.shape != given.shape:
            raise InputError(
                f"`pretrained`: got {given.shape} for"
                f" {jax.tree_util.keystr(path, simple=True, separator='.')}; allowed:"
                f" {own.shape}; give model.vocab, model.layers, model.width and train.sequence of"
                " the BERT"
            )
        return jnp.array(given, own.dtype)  # a copy, since the step's arguments are donated

    if missing := [name for name in ENCODER if name not in pretrained]:
        raise InputError(f"`pretrained`: got no {', '.join(missing)}; allowed: a BERT's parameters")
    encoder = jax.tree_util.tree_map_with_path(copied, _encoder(params), _encoder(pretrained))
    return params | encoder


def _encoder(params: dict) -> dict:
    return {name: params[name] for name in ENCODER}


def split(config: GlueConfig) -> Split:
    """Returns the model. A batch is a dict from `data.tokens.batch`. No position attends to
    padding.
    """
    base, task, wide = bert.split(config), TASKS[config.data.task], parameter_dtype(config.model)

    def embed(outer, batch, key=None):
        return base.embed(outer, batch, key), batch["tokens"] != PAD

    def head(outer, x_BSD, batch):
        return losses(task, _scores(outer, x_BSD).astype(wide), batch["labels"]).mean()

    return Split(embed, base.layer, head)


def scores(config: GlueConfig):
    """Returns scores(params, batch) -> (B, K), without dropout. A batch needs no labels."""
    wide = parameter_dtype(config.model)
    head = lambda outer, x_BSD, batch: _scores(outer, x_BSD).astype(wide)
    return whole(dataclasses.replace(split(config), head=head))


def _scores(outer, x_BSD):
    dense = lambda p, x: x @ p["kernel"].astype(x.dtype) + p["bias"].astype(x.dtype)
    return dense(outer["classifier"], jnp.tanh(dense(outer["pooler"], x_BSD[:, 0])))


def losses(task: Task, scores_BK, labels_B):
    """Returns losses (B,): cross entropies in nats, or squared errors of a regression's scores."""
    if task.labels:
        return optax.losses.softmax_cross_entropy_with_integer_labels(scores_BK, labels_B)
    return optax.losses.squared_error(scores_BK[:, 0], labels_B.astype(scores_BK.dtype))


def batch_shape(config: GlueConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a training batch."""
    B, S = config.train.batch, config.train.sequence
    label = np.int32 if TASKS[config.data.task].labels else np.float32
    tokens = jax.ShapeDtypeStruct((B, S), np.int32)
    return {"tokens": tokens, "segments": tokens, "labels": jax.ShapeDtypeStruct((B,), label)}
