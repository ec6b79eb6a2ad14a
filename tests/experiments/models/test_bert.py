"""BERT: Devlin et al.'s sizes and layers, spelled plainly beside it; what is masked, and what is
predicted.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command.load import load
from experiments.data.tokens import MASK
from experiments.models import bert
from experiments.steps.step import abstract, make_loss
from tests.experiments.states import first_state, tokens

MICRO = (
    "model.kind=bert", "model.vocab=300", "model.layers=2", "model.width=32", "train.batch=4",
    "train.sequence=20", "train.loss_chunk=4", "model.dropout=0.0", "model.attention_dropout=0.0",
)  # fmt: skip


def micro(*overrides):
    return load("gpt_nano", (*MICRO, *overrides))


def test_bert_4b_has_4_billion_parameters():
    state, shape = abstract(load("bert_4b"))
    assert 4.0e9 < sum(math.prod(a.shape) for a in jax.tree.leaves(state.params)) < 4.3e9
    assert shape["tokens"].shape == (64, 128)


def plain_loss(params, model, batch):
    """BERT spelled without Flax, layer by layer."""

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    gelu = lambda x: x * (1 + jax.scipy.special.erf(x / math.sqrt(2))) / 2
    dense = lambda x, p: x @ p["kernel"] + p["bias"]
    heads = lambda a: a.reshape(*a.shape[:2], model.heads, -1).swapaxes(1, 2)
    where = params["positions"][: batch["tokens"].shape[1]] + params["segments"][0]
    x = norm(params["embedding"][batch["tokens"]] + where, params["first"])
    for i in range(model.layers):
        p = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
        q, k, v = map(heads, jnp.split(dense(x, p["qkv"]), 3, -1))
        probs = jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(model.width // model.heads))
        x = norm(x + dense((probs @ v).swapaxes(1, 2).reshape(x.shape), p["proj"]), p["ln1"])
        x = norm(x + dense(gelu(dense(x, p["up"])), p["down"]), p["ln2"])
    hidden = norm(gelu(dense(x, params["transform"])), params["last"])
    logs = jax.nn.log_softmax(hidden @ params["embedding"].T + params["bias"])
    rows = np.arange(len(x))[:, None]
    return -logs[rows, batch["positions"], batch["targets"]].mean()


@pytest.mark.quick("fused")
@pytest.mark.core
@pytest.mark.parametrize("attention", ["materialized", "fused"])
def test_the_loss_is_the_plain_spelling(attention):
    config = micro(f"model.attention={attention}")
    params = first_state(config, shaken=0.1).params
    batch = bert.batch(config, tokens(config), 0, 1)
    plain = jax.jit(lambda params: plain_loss(params, config.model, batch))
    np.testing.assert_allclose(jax.jit(make_loss(config))(params, batch), plain(params), rtol=1e-5)


def test_what_is_masked_is_what_is_predicted():
    config = micro("train.batch=500", "train.sequence=100", "train.loss_chunk=4")
    text = tokens(config)
    batch = bert.batch(config, text, 3, 7)
    assert batch["positions"].shape == batch["targets"].shape == (500, 15)
    assert all(len(set(p)) == 15 for p in batch["positions"].tolist())
    np.testing.assert_array_equal(np.take_along_axis(text, batch["positions"], 1), batch["targets"])
    shown = np.take_along_axis(batch["tokens"], batch["positions"], 1)
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.02)
    kept = (shown == batch["targets"]).mean()
    assert kept == pytest.approx(0.1, abs=0.02)  # and 10 % / 256 by chance
    changed = batch["tokens"] != text[:, :-1]
    assert not changed[~np.isin(np.arange(100), batch["positions"]) * np.ones((500, 1), bool)].any()
    again, other = bert.batch(config, text, 3, 7), bert.batch(config, text, 3, 8)
    np.testing.assert_array_equal(again["positions"], batch["positions"])
    assert (other["positions"] != batch["positions"]).any()
