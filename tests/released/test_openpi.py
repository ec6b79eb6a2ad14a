"""openpi's fine-tuning step as a released step, with its places of states planned: PaliGemma and
its action expert in one scan of checkpoints, in full and with LoRA on both.

The oracle is openpi's form of the step: `nnx.DiffState` differentiates the trained parameters, and
the optimizer's state has the trained parameters alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from examples.stacks.openpi_shape import Config, Expert, Vision, batch_of, init
from jaxmem.plans import Assignment

pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]
EXPERT = Expert(width=64, depth=12, mlp=256, heads=4, kv_heads=1, head_dim=16)
CONFIG = Config(
    language=EXPERT,
    action=dataclasses.replace(EXPERT, width=32, mlp=64),
    vision=Vision(24, 2, 48, 2),
    vocab=64,
    batch=2,
    prompt=4,
    side=8,
    images=1,
    horizon=4,
    average=None,
)
RANKS = {"full": 0, "LoRA": 2}
CLIP = 1.0
STEPS = 10


def adam():
    # A larger eps: Adam would magnify the rounding of gradients near zero.
    return optax.adamw(1e-3, eps=0.01)


def config_of(way, dtype):
    rank = RANKS[way]
    experts = (dataclasses.replace(e, rank=rank) for e in (CONFIG.language, CONFIG.action))
    language, action = experts
    return dataclasses.replace(CONFIG, language=language, action=action, dtype=dtype)


def floating(tree, change):
    one = lambda a: change(a) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return jax.tree.map(one, tree)


@functools.cache
def openpi(way, dtype):
    """The configuration, the loss, its parameters, and a batch with a key."""
    config = config_of(way, dtype)
    state = jax.jit(functools.partial(init, config, adam()))(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(3), 999))
    # Scales start at zero, and a zero would hide a fault: every parameter is perturbed.
    moved = lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape, p.dtype)
    params, batch = floating(state.params, moved), batch_of(config, jax.random.key(1))
    if dtype == jnp.float64:
        params, batch = (floating(tree, lambda a: a.astype(dtype)) for tree in (params, batch))

    def loss(params, batch, key):
        model = nnx.merge(state.model_def, params)
        model.train()
        return jnp.mean(model.compute_loss(key, *batch, train=True))

    return config, loss, params, (batch, jax.random.key(2)), state.model_def


def plain_step(way, dtype):
    """openpi's step, with the key that a released step passes to the loss of a microbatch."""
    config, *_, model_def = openpi(way, dtype)
    tx = optax.chain(optax.clip_by_global_norm(CLIP), adam())

    def loss_of(model, key, batch):
        return jnp.mean(model.compute_loss(key, *batch, train=True))

    def step(state, batch, key):
        params, moments = state
        model = nnx.merge(model_def, params)
        model.train()
        differentiated = nnx.DiffState(0, config.trained)
        value, gradient = nnx.value_and_grad(loss_of, argnums=differentiated)(
            model, jax.random.split(key, 1)[0], batch
        )
        trained = nnx.filter_state(params, config.trained)
        updates, moments = tx.update(gradient, moments, trained)
        nnx.update(model, optax.apply_updates(trained, updates))
        return (nnx.state(model), moments), value

    return tx, step


def released(way, dtype):
    config, loss, *_ = openpi(way, dtype)
    is_trained = nnx.filterlib.to_predicate(config.trained)
    trainable = lambda params: nnx.map_state(is_trained, params)
    return jaxmem.released_step(adam(), loss, clip=("norm", CLIP), trainable=trainable)


@functools.cache
def wanted(way, dtype):
    """The parameters after ten plain steps, and the last loss."""
    config, _, params, args, _ = openpi(way, dtype)
    tx, step = plain_step(way, dtype)
    state, run = (params, tx.init(nnx.filter_state(params, config.trained))), jax.jit(step)
    for _ in range(STEPS):
        state, loss = run(state, *args)
    return jax.device_get(state[0]), float(loss)


def numbers(tree):
    leaves = [a for a in jax.tree.leaves(jax.device_get(tree)) if a.dtype != jnp.uint32]
    return [np.asarray(a, np.float64) for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)]


def farthest(got, want):
    """The largest difference, relative to the largest value of each array."""
    pairs = zip(numbers(got), numbers(want), strict=True)
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in pairs)


def check(way, got, metrics, before, dtype, most):
    config, *_ = openpi(way, dtype)
    want, loss = wanted(way, dtype)
    assert farthest(got, want) < most
    np.testing.assert_allclose(metrics["loss"], loss, rtol=most)
    split = lambda tree: nnx.split_state(tree, config.frozen, config.trained, ...)
    (frozen, trained, _), (frozen_before, trained_before, _) = split(got), split(before)
    assert jax.tree.leaves(frozen) or way == "full"
    for a, b in zip(*map(jax.tree.leaves, (frozen, frozen_before))):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b))
    for (path, a), b in zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(trained_before)):
        moved = np.abs(jax.device_get(a) - jax.device_get(b)).max()
        # Nothing reads the last hidden states of the first expert, so that their norm only decays.
        assert moved > 1e-5 or "['final_norm']" in jax.tree_util.keystr(path), path


@pytest.mark.parametrize(("dtype", "most"), [(jnp.float64, 1e-11), (jnp.float32, 1e-5)])
@pytest.mark.parametrize("way", RANKS)
def test_ten_steps_are_openpis(way, dtype, most):
    _, _, params, args, _ = openpi(way, dtype)
    step = released(way, dtype)
    state, run = step.init(params, *args), jax.jit(step)
    for _ in range(STEPS):
        state, metrics = run(state, *args)
    check(way, state[0], metrics, params, dtype, most)


@pytest.mark.filterwarnings("ignore:jaxmem. no block's backward reads the tags")
@pytest.mark.parametrize("way", RANKS)
def test_actions_and_places_are_planned(way):
    """The budget is below the least bytes of the step with its states on the device, by half of the
    layers' states."""
    dtype = jnp.float32
    _, _, params, args, _ = openpi(way, dtype)
    step = released(way, dtype)
    state = jax.eval_shape(step.init, params, *args)
    shapes = jax.eval_shape(lambda *a: a, state, *args)
    resident = jaxmem.plans.price(step.with_plan, Assignment.nothing(), *shapes).compiled_bytes
    split = step.of(params, *args).split(state, 0)
    far = [a for a in jax.tree.leaves(split) if a.sharding and a.sharding.memory_kind != "device"]
    states = sum(a.size * a.dtype.itemsize for a in far)
    options = {"decide": ("actions", "states"), "actions": ("keep", "recompute")}
    fitted = jaxmem.jit(step, resident - states // 2, **options)
    state = fitted.init(jax.tree.map(jnp.copy, params), *args)
    for _ in range(STEPS):
        state, metrics = fitted(state, *args)
    plan = fitted.plan
    assert plan.compiled_bytes <= plan.budget_bytes < resident
    assert plan.places.persist < plan.places.layers
    assert plan.host_bytes > states // 4
    check(way, fitted.joined(state)[0], metrics, params, dtype, 1e-5)
