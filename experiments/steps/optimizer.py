"""AdamW as GPT-2's trainers use it: warm-up and cosine, decay of matrices only, gradients clipped."""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from experiments.config.text import Config


def learning_rate(config: Config):
    """Step (int32) -> rate (float32): linear warm-up, then a cosine down to `final_ratio` at the
    last step.
    """
    o, steps = config.optimizer, config.train.steps

    def rate(count):
        count = jnp.asarray(count).astype(jnp.float32)
        progress = jnp.clip((count - o.warmup) / max(1, steps - o.warmup), 0.0, 1.0)
        cosine = o.final_ratio + (1 - o.final_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return o.learning_rate * jnp.where(count < o.warmup, (count + 1) / max(1, o.warmup), cosine)

    return rate


def matrices(params):
    """True where weights decay: kernels and embeddings, not biases and norms."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding", "positions", "segments"), params
    )


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
    """AdamW after clipping, for whole gradients of a batch."""
    o = config.optimizer
    adamw = optax.adamw(
        learning_rate(config),
        o.beta1,
        o.beta2,
        o.epsilon,
        weight_decay=o.weight_decay,
        mask=matrices,
    )
    chained = optax.chain(clipping(config), adamw)
    if o.accumulation != "multi_steps":
        return chained
    wide = jnp.float64 if config.model.dtype == "float64" else jnp.float32
    return optax.MultiSteps(
        chained, config.train.microbatches, accumulator_dtype=wide
    ).gradient_transformation()


def adama(config: Config, axis_name: str | None = None):
    """The same AdamW, which microbatches are folded into."""
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
    )
