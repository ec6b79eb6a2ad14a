"""Steps of microbatches: AdamW on the mean gradient, or AdamA's oracle; each learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.command.load import load
from experiments.config.images import ImageConfig
from experiments.data import images as image_data
from experiments.models import resnet
from experiments.steps import images as image_step
from experiments.steps.images import State, make_step, optimizer
from experiments.steps.optimizer import matrices
from tests.experiments.states import parameters
from tests.shared import adama_oracle
from tests.shared.marks import slow

SMALL = (
    "model.depth=14", "model.width=4", "train.batch=16", "train.steps=20", "train.eval_batches=2",
    "optimizer.warmup=0", "optimizer.learning_rate=0.01", "optimizer.final_ratio=0.1",
    "optimizer.epsilon=1e-4", "optimizer.weight_decay=0.1",
)  # fmt: skip
N = {"scan": 4, "multi_steps": 4, "adama": 4, "none": 1}


@pytest.fixture(autouse=True)
def shallow(monkeypatch):
    """One block, since the compiler takes most of the time."""
    monkeypatch.setitem(resnet.STAGES, 14, (1,))


def config_of(way, *overrides):
    settings = f"optimizer.accumulation={way}", f"train.microbatches={N[way]}"
    return load("resnet50_digits", (*SMALL, *settings, *overrides), ImageConfig)


@functools.cache
def first(wide):
    """Parameters and statistics of the first state, with the scales of the residual branches
    opened.
    """
    config = config_of("none", f"model.dtype={'float64' if wide else 'float32'}")
    return parameters(functools.partial(resnet.create, config))


def state_of(config):
    params, statistics = first(config.model.dtype == "float64")
    return State(params, statistics, optimizer(config).init(params), jnp.zeros((), jnp.int32))


@functools.cache
def digits():
    return image_data.sample(image_data.read(None).train, 0, 0, 16)


@functools.cache
def gradient(config):
    return jax.jit(jax.value_and_grad(resnet.loss(config), has_aux=True))


def one_by_one(config, params, batch):
    """Loss, statistics and gradient after each microbatch, without a scan."""
    statistics, found = first(True)[1], []
    for part in np.split(np.arange(16), config.train.microbatches):
        microbatch = {name: a[part] for name, a in batch.items()}
        (loss, (statistics, accuracy)), grads = gradient(config)(params, statistics, microbatch)
        found.append((loss, accuracy, statistics, jax.tree.map(np.asarray, grads)))
    return found


def expected(config, params, found):
    o, grads = config.optimizer, [one[-1] for one in found]
    if o.accumulation == "adama":
        leaves, structure = jax.tree.flatten(params)
        parts = [lambda _, g=g: jax.tree.leaves(g) for g in grads]
        decayed = jax.tree.leaves(matrices(params))
        settings = o.beta1, o.beta2, o.epsilon, o.weight_decay, decayed
        (after,) = adama_oracle.adama(leaves, [parts], lambda _: o.learning_rate, *settings)
        return jax.tree.unflatten(structure, after)
    how = {"weight_decay": o.weight_decay, "mask": matrices}
    tx = optax.adamw(o.learning_rate, o.beta1, o.beta2, o.epsilon, **how)
    mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)
    return optax.apply_updates(params, tx.update(mean, tx.init(params), params)[0])


@pytest.mark.parametrize("way", [w if w == "adama" else slow(w) for w in N])
def test_each_way_is_its_oracle_and_learns(way):
    jax.config.update("jax_enable_x64", True)
    config, batch = config_of(way, "model.dtype=float64"), digits()
    state, step = state_of(config), jax.jit(make_step(config))
    found = one_by_one(config, state.params, batch)
    want = expected(config, state.params, found)
    state, metrics = step(state, batch)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-12)
    jax.tree.map(close, state.params, want)
    jax.tree.map(close, state.statistics, found[-1][2])
    close(metrics["loss"], np.mean([one[0] for one in found]))
    close(metrics["accuracy"], np.mean([one[1] for one in found]))
    seen = np.stack([image_step.watched(one[-1]) for one in found])
    signal = (seen.mean(0) ** 2).sum()
    close(metrics["snr"], signal / seen.var(0, ddof=1).sum() if len(found) > 1 else 0)
    squares = [optax.tree.norm(one[-1], squared=True) for one in found]
    close(metrics["grad_norm"], np.sqrt(np.mean(squares)))
    losses = [float(metrics["loss"])]
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.3
    assert int(state.step) == 13


def test_signal_to_noise_is_told_without_nan():
    gradients = jnp.array([[1.0, 3.0], [3.0, 3.0]])
    assert float(image_step.signal_to_noise(gradients)) == pytest.approx((4 + 9) / 2)
    assert float(image_step.signal_to_noise(gradients[:1])) == 0
    assert float(image_step.signal_to_noise(jnp.ones((3, 2)))) == 0
    assert image_step.watched({"a": jnp.ones((1000, 3)), "b": jnp.ones(())}).shape == (251,)
