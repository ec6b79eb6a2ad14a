"""Optimizers with the settings of GPT-2's trainers: warm-up, cosine decay of the rate, weight decay
of matrices only, clipped gradients.
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
    """Returns the rate as a function of the step (int32): linear warm-up, then a cosine down to
    `final_ratio` of the peak at the last step.
    """
    o, steps = config.optimizer, config.train.steps

    def rate(count):
        count = jnp.asarray(count).astype(float)
        progress = jnp.clip((count - o.warmup) / max(1, steps - o.warmup), 0.0, 1.0)
        cosine = o.final_ratio + (1 - o.final_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return o.learning_rate * jnp.where(count < o.warmup, (count + 1) / max(1, o.warmup), cosine)

    return rate


def matrices(params):
    """Returns True for kernels and embeddings, whose weights decay, and False for all others."""
    names = "kernel", "embedding", "head", "positions", "segments", "router", "up", "down"
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
    """Returns SGD with momentum, and with weight decay added to the gradient."""
    o = config.optimizer
    decay = optax.add_decayed_weights(o.weight_decay, mask=matrices)
    return optax.chain(decay, optax.sgd(learning_rate(config), momentum=o.beta1))


def named(config: Trained) -> optax.GradientTransformation:
    """Returns the optimizer `optimizer.name`, for whole gradients."""
    tx = {"adamw": adamw, "lion": lion, "sgd": sgd}[config.optimizer.name](config)
    return jaxmem.quantized(tx) if config.optimizer.moments == "int8" else tx


def adama(config: Trained, axis_name: str | None = None):
    """Returns AdamW with folded microbatches: AdamA."""
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
        moments=o.moments,
    )


def multi_steps(
    config: Config | ImageConfig, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns optax.MultiSteps: `tx` on the mean of a batch's microbatches, one call for each."""
    wide = parameter_dtype(config.model)
    return optax.MultiSteps(
        tx, config.train.microbatches, accumulator_dtype=wide
    ).gradient_transformation()


def clipping(config: Config) -> optax.GradientTransformation:
    """Returns the clipping `optimizer.clip` of a whole gradient."""
    o = config.optimizer
    by = {
        "none": optax.identity,
        "value": lambda: optax.clip(o.clip_at),
        "norm": lambda: optax.clip_by_global_norm(o.clip_at),
    }
    return by[o.clip]()


def optimizer(config: Config) -> optax.GradientTransformation:
    """Returns clipping, then the named optimizer, for whole gradients."""
    chained = optax.chain(clipping(config), named(config))
    return multi_steps(config, chained) if _by_microbatch(config) else chained


def image_optimizer(config: ImageConfig) -> optax.GradientTransformation:
    """Returns the optimizer, to be called for each microbatch ("adama", "multi_steps") or batch."""
    if config.optimizer.accumulation == "adama":
        return adama(config)
    return multi_steps(config, named(config)) if _by_microbatch(config) else named(config)


def _by_microbatch(config: Config | ImageConfig) -> bool:
    return config.optimizer.accumulation == "multi_steps"
