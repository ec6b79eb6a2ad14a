"""Runs of a ResNet: what one leaves behind, and what is refused."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from experiments import train_images
from experiments.models import resnet
from experiments.running.images import IMAGES
from experiments.steps.images import State, optimizer
from tests.experiments.states import parameters, read_run

SMALL = (
    "model.depth=14", "model.width=4", "train.batch=16", "train.steps=3", "train.eval_batches=2",
    "optimizer.warmup=0",
)  # fmt: skip


def first_state(config, plan=None):
    params, statistics = parameters(functools.partial(resnet.create, config))
    return State(params, statistics, optimizer(config).init(params), jnp.zeros((), jnp.int32))


def run(out, *overrides):
    return train_images.main(["resnet50_digits", *SMALL, *overrides, "--out", str(out)])


def test_a_run_leaves_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(resnet.STAGES, 14, (1,))  # the compiler takes most of the time
    experiment = dataclasses.replace(IMAGES, first_state=first_state)
    monkeypatch.setattr(train_images, "IMAGES", experiment)
    assert run(tmp_path / "new" / "out") == 0
    summary, rows = read_run(tmp_path / "new" / "out")
    assert rows[0].keys() == {"step", "loss", "accuracy", "grad_norm", "snr"}
    assert np.isfinite(summary["val_loss"])
    assert 0 <= summary["val_accuracy"] <= 1
    assert summary["settings"]["optimizer"]["accumulation"] == "adama"
    assert summary["baseline_bytes"] == summary["compiled_bytes"] > 0
    assert summary["images_per_second"] > 0
    assert "1,438 images to train on, 359 for validation" in capsys.readouterr().err
