"""Optimizers as GPT-2's trainers use AdamW: warm-up, cosine, decay of matrices only, gradients
clipped.
"""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from experiments.config.images import ImageConfig
from experiments.config.sections import Trained
from experiments.config.text import Config
from experiments.models.blocks import parameter_dtype


def learning_rate(config: Trained):
    """Step (int32) -> rate: linear warm-up, then a cosine down to `final_ratio` at the
    last step.
    """
    o, steps = config.optimizer, config.train.steps

    def rate(count):
        count = jnp.asarray(count).astype(float)
        progress = jnp.clip((count - o.warmup) / max(1, steps - o.warmup), 0.0, 1.0)
        cosine = o.final_ratio + (1 - o.final_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return o.learning_rate * jnp.where(count < o.warmup, (count + 1) / max(1, o.warmup), cosine)

    return rate


def matrices(params):
    """True where weights decay: kernels and embeddings, not biases and norms."""
    names = "kernel", "embedding", "head", "positions", "segments"
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)


def adamw(config: Trained) -> optax.GradientTransformation:
    o = config.optimizer
    rates = learning_rate(config), o.beta1, o.beta2, o.epsilon
    return optax.adamw(*rates, weight_decay=o.weight_decay, mask=matrices)


def lion(config: Trained) -> optax.GradientTransformation:
    o = config.optimizer
    rates = learning_rate(config), o.beta1, o.beta2
    return optax.lion(*rates, weight_decay=o.weight_decay, mask=matrices)


def sgd(config: Trained) -> optax.GradientTransformation:
    """With momentum, and decay added to the gradient."""
    o = config.optimizer
    decay = optax.add_decayed_weights(o.weight_decay, mask=matrices)
    return optax.chain(decay, optax.sgd(learning_rate(config), momentum=o.beta1))


def named(config: Trained) -> optax.GradientTransformation:
    """What `optimizer.name` says, for whole gradients."""
    return {"adamw": adamw, "lion": lion, "sgd": sgd}[config.optimizer.name](config)


def adama(config: Trained, axis_name: str | None = None):
    """AdamW, which microbatches are folded into."""
    o = config.optimizer
    return jaxmem.adamaw_a(
        learning_rate(config),
        o.beta1,
        o.beta2,
        o.epsilon,
        weight_decay=o.weight_decay,
        mask=matrices,
        accumulation_steps=config.train.microbatches,
        axis_name=axis_name,
        second_moment=o.second_moment,
    )


def multi_steps(
    config: Config | ImageConfig, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`tx` on the mean of a batch's microbatches, called once for each."""
    wide = parameter_dtype(config.model)
    return optax.MultiSteps(
        tx, config.train.microbatches, accumulator_dtype=wide
    ).gradient_transformation()


def clipping(config: Config) -> optax.GradientTransformation:
    """Of a whole gradient, as `optimizer.clip` says."""
    o = config.optimizer
    by = {
        "none": optax.identity,
        "value": lambda: optax.clip(o.clip_at),
        "norm": lambda: optax.clip_by_global_norm(o.clip_at),
    }
    return by[o.clip]()


def optimizer(config: Config) -> optax.GradientTransformation:
    """What is named, after clipping, for whole gradients of a batch."""
    chained = optax.chain(clipping(config), named(config))
    return multi_steps(config, chained) if _by_microbatch(config) else chained


def image_optimizer(config: ImageConfig) -> optax.GradientTransformation:
    """What is called once a microbatch ("adama", "multi_steps"), or once a batch."""
    if config.optimizer.accumulation == "adama":
        return adama(config)
    return multi_steps(config, named(config)) if _by_microbatch(config) else named(config)


def _by_microbatch(config: Config | ImageConfig) -> bool:
    return config.optimizer.accumulation == "multi_steps"
