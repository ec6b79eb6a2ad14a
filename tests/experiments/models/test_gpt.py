"""The GPT: GPT-2's sizes, causal, tagged as Adacc's table, the same loss however it is computed."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.command.load import load
from experiments.models import blocks, gpt
from experiments.models.loops import scanned
from experiments.models.loss import cross_entropy
from experiments.running.policies import KINDS
from experiments.steps.accumulate import gradient
from experiments.steps.optimizer import learning_rate, matrices, optimizer
from experiments.steps.step import abstract, init_state, make_loss, make_step
from tests.experiments.states import first_state, tags, tokens

SMALL = "model.layers=2", "model.width=32"
MICRO = (*SMALL, "train.batch=4", "train.sequence=16", "train.loss_chunk=4")
DROPS = ("model.dropout=0.2", "model.attention_dropout=0.2")
SPELLED = "model.attention=materialized", "model.attention=fused", "model.activation=relu"
MASKS = {"attn_mask", "attn_out_mask", "mlp_out_mask"}


def micro(*overrides):
    return load("gpt_nano", (*MICRO, "model.dropout=0.0", *overrides))


def test_the_abstract_state_is_the_states_own():
    config = micro(*DROPS)
    state, _ = abstract(config)
    real, drawn = jax.jit(init_state, static_argnums=0)(config), first_state(config)
    shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert shapes(state) == shapes(real) == shapes(drawn)
    jax.tree.map(np.testing.assert_array_equal, real.moments, drawn.moments)
    assert 0.019 < float(real.params["embedding"].std()) < 0.021
    assert (real.key != init_state(micro(*DROPS, "train.seed=1")).key).any()


def reference(params, model, x_BS):
    """GPT-2 spelled plainly, layer by layer, without Flax."""

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    dense = lambda x, p: x @ p["kernel"] + p["bias"]
    split = lambda a: a.reshape(*a.shape[:2], model.heads, -1).swapaxes(1, 2)
    x = params["embedding"][x_BS] + params["positions"][: x_BS.shape[1]]
    for i in range(model.layers):
        p = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
        q, k, v = map(split, jnp.split(dense(norm(x, p["ln1"]), p["qkv"]), 3, -1))
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(model.width // model.heads)
        scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
        x = x + dense((jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape), p["proj"])
        act = (lambda u: jnp.maximum(u, 0)) if model.activation == "relu" else jax.nn.gelu
        x = x + dense(act(dense(norm(x, p["ln2"]), p["up"])), p["down"])
    return norm(x, params["final"])


@functools.partial(jax.jit, static_argnums=0)
def plain_hidden_states(config, params, text):
    return reference(params, config.model, text[:, :-1])


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(config, params, text):
    """Of every position but the last, as the loss is given them."""
    parts = gpt.split(config)
    x = scanned()(parts.layer, params["blocks"], parts.embed(params, text), None)
    norm = nnx.graphdef(nnx.eval_shape(lambda: blocks.Norm(config.model, nnx.Rngs(0))))
    return nnx.merge(norm, nnx.State(params["final"]))(x)


@pytest.mark.quick("model.attention=fused")
@pytest.mark.core
@pytest.mark.parametrize("setting", SPELLED)
def test_hidden_states_and_loss_are_the_plain_spellings(setting):
    config = micro(setting)
    params, text = first_state(config, shaken=0.1).params, tokens(config)
    hidden = plain_hidden_states(config, params, text)
    np.testing.assert_allclose(hidden_states(config, params, text), hidden, atol=2e-5)
    logs = jax.nn.log_softmax(hidden @ params["embedding"].T)
    expected = -jnp.take_along_axis(logs, text[:, 1:, None], -1).mean()
    np.testing.assert_allclose(jax.jit(make_loss(config))(params, text), expected, rtol=1e-5)


def test_tags_are_those_of_adaccs_table():
    assert tags(micro(*DROPS)) == KINDS
    plain = tags(micro()).keys()
    assert plain == KINDS.keys() - MASKS
    assert tags(micro("model.attention=fused")).keys() == plain - {"probs"}
    assert tags(micro("model.activation=relu")).keys() == plain - {"gelu"} | {"relu"}


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_the_chunk_of_the_loss_does_not_matter(chunk):
    rng = np.random.default_rng(0)
    hidden, embedding = (rng.normal(size=s).astype(np.float32) for s in ((2, 16, 8), (300, 8)))
    targets = rng.integers(0, 300, (2, 16))
    loss = jax.jit(jax.value_and_grad(cross_entropy, (0, 1)), static_argnums=3)
    both = lambda chunk: loss(hidden, embedding, targets, chunk)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7)
    jax.tree.map(close, both(chunk), both(8))


def test_a_step_draws_new_masks_every_step():
    state, text = first_state(micro(*DROPS)), tokens(micro(*DROPS))
    step = jax.jit(make_step(micro(*DROPS)))
    after, first = step(state, text)
    assert int(after.step) == 1
    _, second = step(dataclasses.replace(state, step=after.step), text)
    assert abs(float(first["loss"] - second["loss"])) > 1e-4
    _, again = step(state, text)
    assert first["loss"] == again["loss"]


def test_microbatches_give_the_whole_batchs_gradient():
    config = micro()
    params, text = first_state(config).params, tokens(config)
    of = lambda n: jax.jit(lambda p: gradient(make_loss(config), p, text, None, n))
    whole, parts = of(1)(params), of(4)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), whole, parts)


@pytest.mark.parametrize(
    ("clip", "expected"),
    [("none", [3.0, -4.0, 0.0]), ("value", [1.0, -1.0, 0.0]), ("norm", [0.6, -0.8, 0.0])],
)
def test_clipping_comes_before_the_moments(clip, expected):
    tx = optimizer(micro(f"optimizer.clip={clip}", "optimizer.clip_at=1.0"))
    params = {"kernel": jnp.zeros(3)}
    _, (_, (adam, *_)) = tx.update({"kernel": jnp.array([3.0, -4.0, 0.0])}, tx.init(params), params)
    np.testing.assert_allclose(adam.mu["kernel"] / 0.1, expected, rtol=1e-5)


def test_the_rate_warms_up_and_falls_as_a_cosine():
    config = micro("train.steps=110", "optimizer.warmup=10", "optimizer.learning_rate=1.0")
    rate = learning_rate(config)
    at = [float(rate(jnp.int32(i))) for i in (0, 9, 10, 60, 110, 500)]
    np.testing.assert_allclose(at, [0.1, 1.0, 1.0, 0.55, 0.1, 0.1], rtol=1e-5)


def test_only_matrices_decay():
    decays = jax.tree_util.tree_leaves_with_path(matrices(abstract(micro())[0].params))
    names, others = ({path[-1].key for path, yes in decays if yes == of} for of in (True, False))
    assert (names, others) == ({"kernel", "embedding", "positions"}, {"bias", "scale"})
