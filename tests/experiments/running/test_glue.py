"""Fine-tuning on tiny GLUE files: each way learns, released AdamA is AdamA, padding is not seen, a
run leaves its files.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import train_glue
from experiments.command.load import load
from experiments.config.glue import GlueConfig
from experiments.data import glue as glue_data
from experiments.data import tokens as glue_text
from experiments.data.tokens import PAD
from experiments.errors import InputError
from experiments.models import bert
from experiments.models import glue as glue_model
from experiments.running.glue import GLUE, glue_experiment
from experiments.running.planning import Ready
from tests.experiments.states import first_state, read_run

TINY = (
    "model.layers=2", "model.width=16", "model.heads=2", "model.vocab=260", "model.dtype=float32",
    "model.dropout=0.0", "model.attention_dropout=0.0", "plan.budget=none", "train.batch=16",
    "train.microbatches=4", "train.sequence=16", "train.steps=30",
    "optimizer.learning_rate=0.01", "optimizer.warmup=0", "optimizer.final_ratio=1.0",
)  # fmt: skip


def rows_of(n):
    """Two words, of which one is good."""
    return [(f"{'good' if i % 2 else 'bad'} {i // 2}", i % 2) for i in range(n)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SST-2, MNLI and STS-B, small and separable."""
    made = tmp_path_factory.mktemp("glue_data")
    three = ("entailment", "neutral", "contradiction")
    pairs = "sentence1\tsentence2"
    parts = [f"P\tH{i}\t{three[i % 3]}\n" for i in range(9)]
    sides = ("train", "dev_matched", "dev_mismatched")
    files = {f"MNLI/{side}": "".join([f"{pairs}\tgold_label\n", *parts]) for side in sides}
    for side, words, scores in (("train", 64, 16), ("dev", 21, 2)):
        lines = [f"{text}\t{label}\n" for text, label in rows_of(words)]
        files[f"SST-2/{side}"] = "".join(["sentence\tlabel\n", *lines])
        alike = "alike\talike\t4.8\nnotnot\tlikely\t0.2\n" * scores
        files[f"STS-B/{side}"] = f"{pairs}\tscore\n{alike}"
    for name, content in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / f"{name}.tsv").write_text(content)
    return made


def config_of(way="released", *overrides):
    settings = *TINY, f"optimizer.accumulation={way}", "data.task=SST-2", *overrides
    return load("bert_glue", settings, GlueConfig)


def batch_of(config, step=1, n=64):
    texts, labels = zip(*rows_of(n))
    examples = glue_data.Examples([(text.encode(),) for text in texts], np.array(labels, np.int32))
    return glue_text.sample(examples, 0, step, config.train.batch, config.train.sequence)


def shaken(config):
    """Parameters of the first state, none of them near zero."""
    return first_state(config, shaken=0.3).params


@pytest.mark.core
@pytest.mark.parametrize("kind", ["materialized", "fused"])
def test_padding_does_not_change_the_output(kind):
    jax.config.update("jax_enable_x64", True)
    settings = "scan", "model.dtype=float64", f"model.attention={kind}"
    short, long = config_of(*settings), config_of(*settings, "train.sequence=40")
    params = shaken(long)
    cut = params | {"positions": params["positions"][:16]}
    scores = jax.jit(glue_model.scores(long))
    got = np.asarray(scores(params, batch_of(long)))
    cut_scores = jax.jit(glue_model.scores(short))(cut, batch_of(short))
    np.testing.assert_allclose(got, cut_scores, rtol=1e-12)
    other = params | {"embedding": params["embedding"].at[PAD].set(7.0)}
    np.testing.assert_array_equal(got, scores(other, batch_of(long)))
    assert np.ptp(got[:, 0]) > 1e-3  # of texts that differ


def test_the_second_text_is_told_from_the_first():
    config = config_of("scan")
    batch, params, split = batch_of(config), shaken(config), glue_model.split(config)
    embed = jax.jit(split.embed)
    x_BSD, seen_BS = embed(params, batch)
    other_BSD, _ = embed(params, batch | {"segments": 1 - batch["segments"]})
    assert (x_BSD != other_BSD).any(-1).all()
    np.testing.assert_array_equal(seen_BS, batch["tokens"] != PAD)


def run(folder, out, *overrides):
    line = ["bert_glue", *TINY, f"data.path={folder}", *overrides, "--out", str(out)]
    return train_glue.main(line)


def test_a_run_leaves_what_glue_measures(folder, tmp_path, capsys):
    assert run(folder, tmp_path / "out", "data.task=SST-2") == 0
    summary, _ = read_run(tmp_path / "out")
    assert summary["validation"].keys() == {"dev"}
    assert summary["validation"]["dev"]["accuracy"] == 1.0
    assert summary["validation"]["dev"]["loss"] == summary["val_loss"] < 0.2
    assert (summary["steps"], summary["config"]) == (30, "bert_glue")
    assert summary["command"].startswith("python -m experiments.train_glue bert_glue model.layers")
    assert "64 examples to train on, 21 for validation" in capsys.readouterr().err


@pytest.mark.slow
def test_scores_are_regressed(folder, tmp_path):
    settings = "data.task=STS-B", "optimizer.accumulation=adama", "train.steps=60"
    assert run(folder, tmp_path, *settings) == 0
    summary, rows = read_run(tmp_path)
    assert summary["validation"]["dev"].keys() == {"loss", "pearson", "spearman"}
    assert summary["validation"]["dev"]["pearson"] > 0.99
    assert summary["val_loss"] < 1 < 5 < rows[0]["loss"]


def test_mnli_is_measured_on_both_its_files(folder, tmp_path, monkeypatch):
    ready = Ready(lambda state, batch: (state, {"loss": 1.0, "grad_norm": 1.0}), None, 1)
    first = lambda config, plan: first_state(config)
    stubs = {"step": lambda config, data: ready, "first_state": first}
    monkeypatch.setattr(train_glue, "GLUE", dataclasses.replace(GLUE, **stubs))
    assert run(folder, tmp_path, "data.task=MNLI", "train.steps=3") == 0
    summary, _ = read_run(tmp_path)
    assert summary["validation"].keys() == {"dev_matched", "dev_mismatched"}
    for measured in summary["validation"].values():
        assert measured["loss"] == pytest.approx(np.log(3), abs=0.05)
        assert measured["accuracy"] in (0.0, 3 / 9, 6 / 9, 1.0)


def whole_bert(config, key):
    outer, layer = bert.parts(config, key)
    return outer | {"blocks": jax.vmap(layer)(jnp.arange(config.model.layers))}


def test_a_bert_may_be_given_to_start_from():
    config = config_of()
    pretrained = jax.jit(functools.partial(whole_bert, config))(jax.random.key(5))
    state = glue_experiment(pretrained).first_state(config, None)
    for name in glue_model.ENCODER:
        jax.tree.map(np.testing.assert_array_equal, state.params[name], pretrained[name])
    assert state.params.keys() == {*glue_model.ENCODER, "pooler", "classifier"}
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert state.params["embedding"].is_deleted()
    assert not pretrained["embedding"].is_deleted()  # it was copied
    params = first_state(config).params
    longer = params | {"positions": jnp.zeros((32, 16))}
    less = {k: v for k, v in pretrained.items() if k not in ("first", "segments")}
    other = r"got \(16, 16\) for positions; allowed: \(32, 16\); .*train\.sequence"
    with pytest.raises(InputError, match=f"`pretrained`: {other}"):
        glue_model.onto(longer, pretrained)
    missing = "got no segments, first; allowed: a BERT's parameters"
    with pytest.raises(InputError, match=f"`pretrained`: {missing}"):
        glue_model.onto(params, less)
