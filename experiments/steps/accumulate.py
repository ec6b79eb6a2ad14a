"""Five ways to update parameters and moments from a batch's microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models.sharding import microbatched
from experiments.models.split import whole
from experiments.steps.optimizer import adama, clipping, named, optimizer

# (params, moments, batch, key or None) -> (params, moments, metrics)
Update = Callable[[Any, Any, Any, Any], Any]


def added_up(config: Config, loss) -> Update:
    """Sums gradients in place, then updates once: the baseline of AdamA."""
    tx = optimizer(config)

    def update(params, moments, batch, key):
        value, grads = gradient(loss, params, batch, key, config.train.microbatches)
        updates, moments = tx.update(grads, moments, params)
        return (
            optax.apply_updates(params, updates),
            moments,
            {"loss": value, "grad_norm": optax.tree.norm(grads)},
        )

    return update


def added_in_place(config: Config, plan=None) -> Update:
    """As `added_up`, but the backward adds each layer's gradient to the sum, so that memory never
    contains a second whole gradient.
    """
    tx, n = optimizer(config), config.train.microbatches

    def add(total, gradient):
        return jax.tree.map(lambda t, g: t + g / n, total, gradient)

    def update(params, moments, batch, key):
        zero = jax.tree.map(jnp.zeros_like, params)
        grads, values = summed_in_place(config, params, batch, key, add, zero, plan)
        updates, moments = tx.update(grads, moments, params)
        found = {"loss": values.mean(), "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), moments, found

    return update


def summed_in_place(config: Config, params, batch, key, add, zero, plan=None):
    """Returns the sum of the microbatches' gradients, to which the backward adds each layer's
    gradient, and the microbatches' losses.

    add: `add(total, gradient)` of one layer's trees, or of the trees of the other parameters.
    zero: the first value of the sum.
    """
    split = models.split(config)
    outer, blocks = {k: v for k, v in params.items() if k != "blocks"}, params["blocks"]

    def one(total, indexed):
        def loss(outer, sums, part, key):
            held = lambda layer, blocks, x, key, *shared: jaxmem.stack(
                layer, blocks, x, *shared, key=key, plan=plan, moments=sums, fold=add
            )
            return whole(split, held)(outer | {"blocks": blocks}, part, key)

        value, (d_outer, sums) = jax.value_and_grad(loss, (0, 1))(
            outer, total["blocks"], *_microbatch(indexed, key)
        )
        rest = {k: v for k, v in total.items() if k != "blocks"}
        return add(rest, d_outer) | {"blocks": sums}, value

    return jax.lax.scan(one, zero, microbatches(batch, config.train.microbatches))


def by_multi_steps(config: Config, loss) -> Update:
    """Calls `optax.MultiSteps` once for each microbatch."""
    tx, n = optimizer(config), config.train.microbatches

    def update(params, moments, batch, key):
        def one(carry, indexed):
            params, moments = carry
            value, grads = jax.value_and_grad(loss)(params, *_microbatch(indexed, key))
            updates, moments = tx.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), (value, optax.tree.norm(grads))

        (params, moments), (values, norms) = jax.lax.scan(
            one, (params, moments), microbatches(batch, n)
        )
        return params, moments, {"loss": values.mean(), "grad_norm": jnp.sqrt((norms**2).mean())}

    return update


def folded(config: Config, loss) -> Update:
    """Folds the whole gradient of each microbatch by AdamA."""
    tx, clip, n = adama(config), clipping(config), config.train.microbatches

    def update(params, moments, batch, key):
        def one(folded, indexed):
            value, grads = jax.value_and_grad(loss)(params, *_microbatch(indexed, key))
            clipped, _ = clip.update(grads, clip.init(params), params)
            return tx.fold(folded, clipped), (value, optax.tree.norm(grads))

        begun = tx.begin(moments)
        moments, (values, norms) = jax.lax.scan(one, begun, microbatches(batch, n))
        updates, moments = tx.finish(moments, params)
        found = {"loss": values.mean(), "grad_norm": jnp.sqrt((norms**2).mean())}
        return optax.apply_updates(params, updates), moments, found

    return update


def released(step) -> Update:
    """Folds each layer's gradient into AdamA's moments in the backward, or updates the layer there.

    step: the result of `released_step`.
    """

    def update(params, moments, batch, key):
        (params, moments), metrics = step((params, moments), batch, key)
        return params, moments, metrics

    return update


def released_step(config: Config, plan=None, axis_name: str | None = None, dtype=None):
    """Returns jaxmem's released step of the config's model."""
    o, split = config.optimizer, models.split(config)
    clip = None if o.clip == "none" else (o.clip, o.clip_at)
    tx = adama(config, axis_name) if o.name == "adamw" else named(config)
    options = {"layers": "blocks", "dtype": dtype, "clip": clip, "axis_name": axis_name}
    return jaxmem.released_step(tx, split.embed, split.layer, split.head, plan=plan, **options)


def gradient(loss, params, batch, key, n: int):
    """Returns the mean loss and gradient over the `n` microbatches of a batch, one at a time."""
    if n == 1:
        return jax.value_and_grad(loss)(params, batch, key)

    def one(total, indexed):
        got = jax.value_and_grad(loss)(params, *_microbatch(indexed, key))
        return jax.tree.map(lambda t, g: t + g / n, total, got), None

    parts = microbatches(batch, n)
    first = jax.tree.map(lambda a: a[0], parts[1])
    zeros = (
        jax.tree.map(jnp.zeros_like, jax.eval_shape(loss, params, first, key)),
        jax.tree.map(jnp.zeros_like, params),
    )
    total, _ = jax.lax.scan(one, zeros, parts)
    return total


def microbatches(batch, n: int):
    """Returns the numbers of microbatches, and the batch with a leading axis of microbatches."""
    return jnp.arange(n, dtype=jnp.uint32), jax.tree.map(lambda a: microbatched(a, n), batch)


def _microbatch(indexed, key):
    index, part = indexed
    return part, None if key is None else jax.random.fold_in(key, index)
