"""A text that a model makes up: each byte is drawn from what the model says of those before it."""

import json

import pytest

from experiments import train
from experiments.command.load import load
from experiments.running.sample import sample
from experiments.steps.step import first_state

LINE = "0123456789\n"
SMALL = (
    "model.layers=2", "model.width=32", "train.sequence=8", "train.loss_chunk=8", "train.batch=8",
    "train.eval_batches=1", "optimizer.warmup=1", "plan.budget=none", "model.heads=2",
    "model.dropout=0.0",
)  # fmt: skip


def config_of(*settings):
    return load("gpt_nano", (*SMALL, *settings))


def test_it_is_drawn_by_the_seed_and_the_temperature():
    of = lambda *settings: sample(config_of("sample.length=30", *settings), params)
    params = first_state(config_of()).params
    assert of() == of()
    assert of() != of("train.seed=1")
    assert of() != of("sample.temperature=2.0")
    assert len(set(of("sample.temperature=100.0"))) > 15, "nearly even"


@pytest.mark.quick("22")
@pytest.mark.parametrize("length", [0, 22])
def test_a_run_ends_with_what_it_learned(tmp_path, length, capsys):
    (tmp_path / "text").write_text(LINE * 200)
    settings = (f"data.path={tmp_path / 'text'}", "train.steps=200", "sample.temperature=0")
    arguments = ["gpt_nano", *SMALL, *settings, f"sample.length={length}"]
    out = tmp_path / "out"
    assert train.main([*arguments, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    shown = capsys.readouterr().err
    if length:
        assert summary["sample"] == (out / "sample.txt").read_text() == LINE * 2
        assert "sample: '0123456789\\n" in shown
    else:
        assert "sample" not in summary
        assert not (out / "sample.txt").exists()
        assert "sample:" not in shown


def test_a_model_that_sees_what_comes_has_none():
    kind = "model.kind=bert", "model.vocab=260"
    assert load("gpt_nano", kind).sampled == 0
    assert load("gpt_nano").sampled == 200
