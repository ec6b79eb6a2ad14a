"""The state of an image experiment, and `make_step(config) -> step(state, batch) -> (state,
metrics)`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.config.images import ImageConfig
from experiments.models import resnet, sharding
from experiments.steps.optimizer import image_optimizer as optimizer

WATCHED = 256  # number of values of each array in the comparison of microbatches' gradients


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "statistics", "moments", "step"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """The state that a step updates. `statistics`: running averages of batch normalizations."""

    params: dict[str, Any]
    statistics: dict[str, Any]
    moments: Any
    step: jax.Array


def init_state(config: ImageConfig) -> State:
    """Returns the first state. Under `jax.eval_shape`, it allocates nothing."""
    params, statistics = resnet.create(config, jax.random.key(config.train.seed))
    return State(params, statistics, optimizer(config).init(params), jnp.zeros((), jnp.int32))


class Way(NamedTuple):
    """`begin(params, moments) -> held`, `fold(held, gradient) -> held` for each microbatch,
    `finish(held) -> (params, moments)`.

    All microbatches' gradients are at the parameters from before the batch.
    """

    begin: Any
    fold: Any
    finish: Any


def once_a_microbatch(tx) -> Way:
    """Calls a transformation that updates no parameters before the last microbatch."""

    def fold(held, gradient):
        params, moments = held
        updates, moments = tx.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments

    return Way(lambda params, moments: (params, moments), fold, lambda held: held)


def added_up(tx, n: int) -> Way:
    """Computes the mean of the microbatches' gradients, then updates once."""

    def begin(params, moments):
        return params, moments, jax.tree.map(jnp.zeros_like, params)

    def fold(held, gradient):
        params, moments, total = held
        return params, moments, jax.tree.map(lambda t, g: t + g / n, total, gradient)

    def finish(held):
        params, moments, total = held
        updates, moments = tx.update(total, moments, params)
        return optax.apply_updates(params, updates), moments

    return Way(begin, fold, finish)


def make_step(config: ImageConfig):
    """Returns step(state, batch) -> (state, metrics). `batch` is a dict of images (B, H, W, 3) and
    labels (B,).

    Metrics: `loss`, `accuracy`, `grad_norm` (the root mean square over microbatches), and `snr`.
    """
    tx, n = optimizer(config), config.train.microbatches
    folds = config.optimizer.accumulation in ("adama", "multi_steps")
    way = once_a_microbatch(tx) if folds else added_up(tx, n)
    gradient = jax.value_and_grad(resnet.loss(config), has_aux=True)

    def step(state: State, batch):
        def one(carry, part):
            held, statistics = carry
            (loss, (statistics, accuracy)), grads = gradient(held[0], statistics, part)
            found = {
                "loss": loss,
                "accuracy": accuracy,
                "square": optax.tree.norm(grads, squared=True),
            }
            return (way.fold(held, grads), statistics), (found, watched(grads))

        parts = jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), batch)
        begun = way.begin(state.params, state.moments), state.statistics
        (held, statistics), (found, seen_NK) = jax.lax.scan(one, begun, parts)
        metrics = jax.tree.map(jnp.mean, found)
        metrics |= {"grad_norm": jnp.sqrt(metrics.pop("square")), "snr": signal_to_noise(seen_NK)}
        params, moments = way.finish(held)
        return State(params, statistics, moments, state.step + 1), metrics

    return sharding.step(step)


def watched(gradient):
    """Returns at most `WATCHED` values of each array, spread evenly. More values would use
    the memory that AdamA saves.
    """
    return jnp.concatenate(
        [g.reshape(-1)[:: -(-g.size // WATCHED)] for g in jax.tree.leaves(gradient)]
    )


def signal_to_noise(gradients_NK):
    """Returns |mean|² / (sum of variances) of N microbatches' gradients; 0 for one microbatch, or
    if the variance is 0.
    """
    n = len(gradients_NK)
    mean_K = gradients_NK.mean(0)
    signal, noise = (mean_K**2).sum(), ((gradients_NK - mean_K) ** 2).sum() / max(1, n - 1)
    return jnp.where(noise > 0, signal / jnp.where(noise > 0, noise, 1), 0)
