"""The state, and `make_step(config, plan) -> step(state, tokens) -> (state, metrics)`: what `jaxmem.plan` is given."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmem
from experiments import gpt
from experiments.config import Config
from experiments.loops import Loop, scanned, stacked
from experiments.loss import cross_entropy
from experiments.optimizer import optimizer


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "moments", "step", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that a step changes. `key`: uint32[2], the dropout's; a step's own key is folded from it."""

    params: dict[str, Any]
    moments: Any
    step: jax.Array
    key: jax.Array


def init_state(config: Config) -> State:
    """The first state; under `jax.eval_shape` it allocates nothing."""
    params_key, dropout_key = jax.random.split(jax.random.key(config.train.seed))
    params = gpt.create(config.model, config.train.sequence, params_key)
    moments = optimizer(config).init(params)
    return State(params, moments, jnp.zeros((), jnp.int32), jax.random.key_data(dropout_key))


def abstract(config: Config) -> tuple[State, jax.ShapeDtypeStruct]:
    """State and tokens of a step, as shapes."""
    tokens = jax.ShapeDtypeStruct((config.train.batch, config.train.sequence + 1), jnp.int32)
    return jax.eval_shape(functools.partial(init_state, config)), tokens


def make_loss(config: Config, loop: Loop | None = None):
    """loss(params, tokens, key or None) -> mean loss in nats a position, of int32 tokens (batch, sequence + 1)."""
    structure = gpt.structure(config.model, config.train.sequence)

    def loss(params, tokens, key=None):
        model = nnx.merge(structure, nnx.State(params))
        hidden = model(tokens[:, :-1], key, loop)
        return cross_entropy(hidden, params["embedding"], tokens[:, 1:], config.train.loss_chunk)

    return loss


def make_step(config: Config, plan=None):
    """step(state, tokens) -> (state, metrics). `plan`: a jaxmem.Plan, or None to keep everything."""
    return step_over(config, stacked(plan) if config.model.loop == "stack" else scanned(jaxmem.remat_policy(plan)))


def step_over(config: Config, loop: Loop):
    """The same with the layers under any loop: under any policy of `jax.checkpoint`, jaxmem's or JAX's own."""
    loss, tx = make_loss(config, loop), optimizer(config)

    def step(state: State, tokens):
        key = None
        if config.model.dropout or config.model.attention_dropout:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        value, grads = gradient(loss, state.params, tokens, key, config.train.microbatches)
        updates, moments = tx.update(grads, state.moments, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return State(params, moments, state.step + 1, state.key), metrics

    return step


def gradient(loss, params, tokens, key, microbatches: int):
    """Loss and gradient of a batch, as the mean over its microbatches, one after the other."""
    if microbatches == 1:
        return jax.value_and_grad(loss)(params, tokens, key)

    def one(total, indexed):
        index, part = indexed
        own = None if key is None else jax.random.fold_in(key, index)
        got = jax.value_and_grad(loss)(params, part, own)
        return jax.tree.map(lambda t, g: t + g / microbatches, total, got), None

    parts = tokens.reshape(microbatches, -1, tokens.shape[1])
    zeros = (
        jax.tree.map(jnp.zeros_like, jax.eval_shape(loss, params, parts[0], key)),
        jax.tree.map(jnp.zeros_like, params),
    )
    total, _ = jax.lax.scan(one, zeros, (jnp.arange(microbatches, dtype=jnp.uint32), parts))
    return total
