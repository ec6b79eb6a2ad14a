"""Ways to make one step of microbatches: the same gradients, Adam's moments or AdamA's; each
trains, a plan fits each.
"""

import jax
import numpy as np
import optax
import pytest

from experiments.command.load import load
from experiments.models import registry as models
from experiments.steps.optimizer import optimizer
from experiments.steps.step import make_loss, make_step
from tests.experiments.states import first_state as init_state
from tests.shared.marks import slow

SMALL = (
    "model.layers=2", "model.width=32", "train.batch=8", "train.sequence=16", "train.loss_chunk=4",
    "train.microbatches=4", "train.steps=20", "optimizer.warmup=0",
)  # fmt: skip
KINDS = {"gpt": (), "bert": ("model.kind=bert", "model.vocab=300"), "llama": ()}
WAYS = ("scan", "in_place", "multi_steps", "adama", "released")


def config_of(way, kind="gpt", *overrides):
    loop = ("model.loop=stack",) if way in ("in_place", "released") else ()
    how = *loop, f"optimizer.accumulation={way}", "optimizer.clip=value"
    name = "llama_nano" if kind == "llama" else "gpt_nano"
    return load(name, (*SMALL, *KINDS[kind], *how, *overrides))


def dropping(kind, rate):
    """Settings of both dropouts; a Llama has none."""
    names = () if kind == "llama" else ("dropout", "attention_dropout")
    return tuple(f"model.{name}={rate}" for name in names)


def batch_of(config, step=1):
    t = config.train
    rows = np.random.default_rng(step).integers(0, 256, (t.batch, t.sequence + 1)).astype(np.int32)
    return models.batch(config, rows, step)


def trained(config, steps=3):
    state, step, found = init_state(config), jax.jit(make_step(config)), []
    for i in range(steps):
        state, metrics = step(state, batch_of(config, i))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, found


def close(got, want, rtol=1e-9):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12), got, want)


@pytest.mark.quick("llama")
@pytest.mark.core
@pytest.mark.parametrize("kind", ["gpt", slow("bert"), "llama"])
def test_whole_and_released_gradients_give_the_same_parameters(kind):
    exact = "model.dtype=float64", *dropping(kind, 0.2)
    jax.config.update("jax_enable_x64", True)
    whole, _ = trained(config_of("adama", kind, *exact))
    released, found = trained(config_of("released", kind, *exact))
    close(released.params, whole.params)
    close(released.moments, whole.moments)
    assert found[0][0] > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adding_up_and_multi_steps_are_adam_on_the_batchs_gradient(kind):
    jax.config.update("jax_enable_x64", True)
    plain = ("model.dtype=float64", *dropping(kind, 0.0), "optimizer.epsilon=0.01")
    config = config_of("scan", kind, *plain)
    start, batch, tx = init_state(config), batch_of(config), optimizer(config)
    grads = jax.jit(jax.grad(make_loss(config)))(start.params, batch)
    updates, _ = tx.update(grads, start.moments, start.params)
    want = optax.apply_updates(start.params, updates)
    for way in ("scan", "in_place", "multi_steps"):
        config = config_of(way, kind, *plain)
        state, metrics = jax.jit(make_step(config))(init_state(config), batch)
        close(state.params, want, 1e-6)  # rates are float32
        np.testing.assert_allclose(metrics["loss"], make_loss(config)(start.params, batch))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_way_learns(kind, way):
    config = config_of(way, kind, "optimizer.learning_rate=0.01")
    state, step = init_state(config), jax.jit(make_step(config), donate_argnums=0)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch_of(config))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.3
    assert np.isfinite(float(metrics["grad_norm"]))
