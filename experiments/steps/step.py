"""The state, and `make_step(config, plan) -> step(state, batch) -> (state, metrics)`: what
`jaxmem.plan` is given.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models.loops import Loop, scanned, stacked
from experiments.models.split import whole
from experiments.steps.optimizer import adama, clipping, optimizer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "moments", "step", "key"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that a step changes. `key`: uint32[2], the dropout's; a step's own key is folded
    from it.
    """

    params: dict[str, Any]
    moments: Any
    step: jax.Array
    key: jax.Array


def init_state(config: Config) -> State:
    """The first state; under `jax.eval_shape` it allocates nothing."""
    params_key, dropout_key = jax.random.split(jax.random.key(config.train.seed))
    params = models.create(config, params_key)
    folds = config.optimizer.accumulation in ("adama", "released")
    moments = (adama(config) if folds else optimizer(config)).init(params)
    return State(params, moments, jnp.zeros((), jnp.int32), jax.random.key_data(dropout_key))


def abstract(config: Config) -> tuple[State, Any]:
    """State and batch of a step, as shapes."""
    return jax.eval_shape(functools.partial(init_state, config)), models.batch_shape(config)


def make_loss(config: Config, loop: Loop | None = None):
    """loss(params, batch, key=None) -> mean loss in nats a prediction. A key means dropout."""
    return whole(models.split(config), loop)


def make_step(config: Config, plan=None):
    """step(state, batch) -> (state, metrics). `plan`: a jaxmem.Plan, or None to keep everything."""
    by_layer = {"released": released, "in_place": added_in_place}
    if config.optimizer.accumulation in by_layer:
        return _step(config, by_layer[config.optimizer.accumulation](config, plan))
    return step_over(
        config,
        stacked(plan) if config.model.loop == "stack" else scanned(jaxmem.remat_policy(plan)),
    )


def step_over(config: Config, loop: Loop):
    """The same with the layers under any loop: under any policy of `jax.checkpoint`, jaxmem's or
    JAX's own.
    """
    loss = make_loss(config, loop)
    ways = {"scan": added_up, "multi_steps": by_multi_steps, "adama": folded}
    return _step(config, ways[config.optimizer.accumulation](config, loss))


Update = Callable[
    [Any, Any, Any, Any], Any
]  # (params, moments, batch, key or None) -> (params, moments, metrics)


def _step(config: Config, update: Update):
    def step(state: State, batch):
        key = None
        if config.model.dropout or config.model.attention_dropout:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        params, moments, metrics = update(state.params, state.moments, batch, key)
        return State(params, moments, state.step + 1, state.key), metrics

    return step


def added_up(config: Config, loss) -> Update:
    """Gradients added up in place, then one AdamW step: what AdamA is measured against."""
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
    """The same with each layer's gradient added to the sum in the backward, so that there is never
    a second one.
    """
    tx, split, n = optimizer(config), models.split(config), config.train.microbatches
    add = lambda total, gradient: jax.tree.map(lambda t, g: t + g / n, total, gradient)

    def update(params, moments, batch, key):
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

        grads, values = jax.lax.scan(
            one, jax.tree.map(jnp.zeros_like, params), microbatches(batch, n)
        )
        updates, moments = tx.update(grads, moments, params)
        found = {"loss": values.mean(), "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), moments, found

    return update


def by_multi_steps(config: Config, loss) -> Update:
    """`optax.MultiSteps`, called once a microbatch."""
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
    """AdamA on whole gradients, each of a microbatch."""
    tx, clip, n = adama(config), clipping(config), config.train.microbatches

    def update(params, moments, batch, key):
        def one(folded, indexed):
            value, grads = jax.value_and_grad(loss)(params, *_microbatch(indexed, key))
            clipped, _ = clip.update(grads, clip.init(params), params)
            mu, nu = folded
            return tx.fold(mu, nu, clipped), (value, optax.tree.norm(grads))

        begun = tx.begin(moments.mu, moments.nu)
        (mu, nu), (values, norms) = jax.lax.scan(one, begun, microbatches(batch, n))
        updates, moments = tx.finish(moments._replace(mu=mu, nu=nu), params)
        found = {"loss": values.mean(), "grad_norm": jnp.sqrt((norms**2).mean())}
        return optax.apply_updates(params, updates), moments, found

    return update


def released(config: Config, plan=None) -> Update:
    """AdamA with each layer's gradient folded in the backward."""
    step = released_step(config, plan)

    def update(params, moments, batch, key):
        (params, moments), metrics = step((params, moments), batch, key)
        return params, moments, metrics

    return update


def released_step(config: Config, plan=None, axis_name: str | None = None, dtype=None):
    """jaxmem's released step over the config's model."""
    o, split = config.optimizer, models.split(config)
    clip = None if o.clip == "none" else (o.clip, o.clip_at)
    tx, layers = adama(config, axis_name), {"layers": "blocks", "dtype": dtype}
    return jaxmem.released_step(
        tx, split.embed, split.layer, split.head, plan=plan, clip=clip, **layers
    )


def gradient(loss, params, batch, key, n: int):
    """Loss and gradient of a batch, as the mean over its `n` microbatches, one after the other."""
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
    """Numbers, and the batch's arrays with a leading axis of microbatches."""
    return jnp.arange(n, dtype=jnp.uint32), jax.tree.map(
        lambda a: a.reshape(n, -1, *a.shape[1:]), batch
    )


def _microbatch(indexed, key):
    index, part = indexed
    return part, None if key is None else jax.random.fold_in(key, index)
