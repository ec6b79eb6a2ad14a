"""The state, and `make_step(config, plan)`, which returns step(state, batch) -> (state, metrics).
`jaxmem.plan` gets `make_step` as its `build`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models import sharding
from experiments.models.loops import Loop, scanned, stacked
from experiments.models.split import whole
from experiments.steps import accumulate
from experiments.steps.accumulate import Update
from experiments.steps.optimizer import adama, optimizer
from jaxmem.plans import Plan


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "moments", "step", "key"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """The state of training. `key`: uint32[2], the key of dropout; each step folds its number into
    the key.
    """

    params: dict[str, Any]
    moments: Any
    step: jax.Array
    key: jax.Array


def init_state(config: Config) -> State:
    """Returns the first state, on the device. Under `jax.eval_shape`, it allocates nothing."""
    params_key, dropout_key = _keys(config)
    params = models.create(config, params_key)
    moments = _first_moments(config, params)
    return State(params, moments, jnp.zeros((), jnp.int32), jax.random.key_data(dropout_key))


def first_state(config: Config) -> State:
    """Returns the first state in the memories that the config names. If layers are stored in host
    memory, they are created one at a time, so that the model may exceed the device's memory. The
    result equals `placed(config, init_state(config))` to the last bit.
    """
    if (where := config.states.where) is None:
        first = functools.partial(init_state, config)
        return jax.jit(first, out_shardings=sharding.shardings(jax.eval_shape(first)))()
    params_key, dropout_key = _keys(config)
    outer = jax.jit(lambda: models.parts(config, params_key)[0])()
    # `create` traces each layer alone, where the parameters outside the layers are dead code.
    layer = lambda i: models.parts(config, params_key)[1](i)
    step = accumulate.released_step(config)
    params, moments = step.create(outer, layer, config.model.layers, **where)
    return State(params, moments, jnp.zeros((), jnp.int32), jax.random.key_data(dropout_key))


def divided_state(config: Config, plan: Plan) -> State:
    """Returns the first state under a plan that divides the states over the devices."""
    state = first_state(config)
    params, moments = plan.place((state.params, state.moments))
    return dataclasses.replace(state, params=params, moments=moments)


def divided_step(step):
    """Returns step(state, batch) -> (state, metrics) from the step of a plan that divides the pair
    of parameters and moments over the devices.
    """

    def whole(state: State, batch):
        (params, moments), metrics = step((state.params, state.moments), batch)
        return State(params, moments, state.step + 1, state.key), metrics

    return whole


def _keys(config: Config) -> jax.Array:
    """Returns the key of parameters, and the key of dropout."""
    return jax.random.split(jax.random.key(config.train.seed))


def _first_moments(config: Config, params):
    if config.optimizer.accumulation == "released":
        return accumulate.released_step(config).init(params)[1]
    folds = config.optimizer.accumulation == "adama"
    return (adama(config) if folds else optimizer(config)).init(params)


def abstract(config: Config) -> tuple[State, Any]:
    """Returns the shapes of a step's state and batch, with shardings if a mesh is set."""
    state = jax.eval_shape(functools.partial(init_state, config))
    if config.states.persist is not None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        put = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here)
        state = placed(config, jax.tree.map(put, state))
    return sharding.shapes(state, models.batch_shape(config))


def placed(config: Config, state: State) -> State:
    """Returns the state in the memories that the config names. `state` may have any placement.
    Arrays that move are deleted from their old memory.
    """
    if (where := config.states.where) is None:
        return state
    return make_step(config).split(state, **where)


def joined(config: Config, state: State) -> State:
    """Returns the state in the joined form, which no placement changes: the form to save."""
    return state if config.states.where is None else make_step(config).joined(state)


def make_loss(config: Config, loop: Loop | None = None):
    """Returns loss(params, batch, key=None) -> mean loss in nats per prediction. A key enables
    dropout.
    """
    return whole(models.split(config), loop)


def make_step(config: Config, plan=None):
    """Returns step(state, batch) -> (state, metrics). `plan`: a jaxmem.Plan; None keeps all."""
    if config.optimizer.accumulation == "in_place":
        return _step(config, accumulate.added_in_place(config, plan))
    if config.optimizer.accumulation == "released":
        released = accumulate.released_step(config, plan)
        put = lambda s, pair: dataclasses.replace(s, params=pair[0], moments=pair[1])
        step = _step(config, accumulate.released(released))
        return released.within(step, get=lambda s: (s.params, s.moments), put=put)
    return step_over(
        config,
        stacked(plan) if config.model.loop == "stack" else scanned(jaxmem.remat_policy(plan)),
    )


def step_over(config: Config, loop: Loop):
    """Returns the step with the layers in any loop, and so under any policy of `jax.checkpoint`,
    jaxmem's or JAX's.
    """
    loss = make_loss(config, loop)
    ways = {
        "scan": accumulate.added_up,
        "multi_steps": accumulate.by_multi_steps,
        "adama": accumulate.folded,
    }
    return _step(config, ways[config.optimizer.accumulation](config, loss))


def _step(config: Config, update: Update):
    def step(state: State, batch):
        key = None
        if config.model.dropout or config.model.attention_dropout:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        params, moments, metrics = update(state.params, state.moments, batch, key)
        return State(params, moments, state.step + 1, state.key), metrics

    return sharding.step(step, is_explicit=models.is_explicit(config))
