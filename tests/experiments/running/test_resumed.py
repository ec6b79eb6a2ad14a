"""A training by the experiments' runner that fails at three points and goes on: rows and last state
are those of one that did not, bit for bit, for each optimizer and each way to save memory.
"""

import dataclasses
import functools
import hashlib

import jax
import numpy as np
import pytest

from experiments.command.load import load
from experiments.running import run as running
from experiments.running.planning import Ready
from experiments.running.text import TEXT
from experiments.steps.step import abstract, init_state, make_step, placed
from jaxmem import runs
from jaxmem._core.actions import KEEP, RECOMPUTE, Choice
from jaxmem._core.assignment import Assignment
from tests.shared.marks import slow

pytestmark = pytest.mark.jax_defaults

SETTINGS = (
    "model.layers=2", "model.width=32", "model.heads=2", "model.dropout=0.1", "model.loop=stack",
    "train.steps=7", "train.batch=4", "train.sequence=32", "train.loss_chunk=32",
    "train.eval_batches=1", "train.save_every=0", "optimizer.warmup=1", "plan.budget=none",
    "sample.length=0", "optimizer.clip=component",
)  # fmt: skip
OPTIMIZERS = {
    "adamw": ("optimizer.accumulation=released", "train.microbatches=1"),
    "adama": ("optimizer.accumulation=released", "train.microbatches=2"),
    "row ratio": (
        "optimizer.accumulation=released", "train.microbatches=2", "optimizer.second_moment=row",
    ),
}  # fmt: skip
INT4 = Choice("compress", "grouped_symmetric(stochastic=true)")
TAGS = "resid_in", "qkv", "mid", "up"
WAYS = {
    "keep": (dict.fromkeys(TAGS, KEEP), ()),
    "recompute": (dict.fromkeys(TAGS, RECOMPUTE), ()),
    "int4": (dict.fromkeys(TAGS, INT4), ()),
    "pinned_host": (dict.fromkeys(TAGS, RECOMPUTE), ("states.persist=1",)),
}
POINTS = 2, 4, 7


class Stop(Exception):
    """What ends a run from within."""


@functools.cache
def case(optimizer: str, way: str):
    choices, more = WAYS[way]
    config = load("gpt_nano", [*SETTINGS, *OPTIMIZERS[optimizer], *more])
    step = make_step(config, Assignment({"block": choices}))
    compiled = jax.jit(step, donate_argnums=0).lower(*abstract(config)).compile()
    return config, Ready(compiled, None, 1)


def digest(state) -> str:
    arrays = map(np.asarray, jax.tree.leaves(state))
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def train(optimizer, way, out, fail=()):
    """The digest of the last state, and the rows; it fails once at each step of `fail`."""
    config, ready = case(optimizer, way)
    left, ended = list(fail), []

    def batch(config, data, number):
        if left and number == left[0]:
            left.pop(0)
            raise Stop
        return TEXT.batch(config, data, number)

    def evaluate(config, state, data):
        ended.append(digest(state))
        return {"val_loss": 0.0}

    parts = {"step": lambda *_: ready, "batch": batch, "evaluate": evaluate}
    experiment = dataclasses.replace(TEXT, **parts)
    while not ended:
        try:
            running.run(experiment, config, out, name="resumed")
        except Stop:
            assert not (out / "summary.json").exists()
    assert not left
    return ended[0], runs.read(out).losses


@pytest.mark.slow
@pytest.mark.parametrize("way", [slow("keep"), "recompute", slow("int4"), slow("pinned_host")])
@pytest.mark.parametrize("optimizer", [slow("adamw"), slow("adama"), "row ratio"])
def test_a_training_that_fails_and_goes_on_is_one_that_did_not(optimizer, way, tmp_path):
    want = train(optimizer, way, tmp_path / "whole")
    assert train(optimizer, way, tmp_path / "failing", POINTS) == want
    assert len(want[1]) == 7


@pytest.mark.slow
def test_a_training_goes_on_with_its_states_elsewhere(tmp_path):
    (_, want), (config, ready) = train("adama", "keep", tmp_path / "whole"), case("adama", "keep")

    class Stopped(Exception):
        pass

    def batch(config, data, number):
        if number == 4 and config.states.persist is not None:
            raise Stopped
        return TEXT.batch(config, data, number)

    # These keys draw other numbers for a layer alone: the state is made whole, and moved.
    first = lambda config, plan: placed(config, jax.jit(init_state, static_argnums=0)(config))
    streamed = case("adama", "pinned_host")
    experiment = lambda ready: dataclasses.replace(
        TEXT,
        first_state=first,
        step=lambda *_: ready,
        batch=batch,
        evaluate=lambda *_: {"val_loss": 0.0},
    )
    with pytest.raises(Stopped):
        running.run(experiment(streamed[1]), streamed[0], tmp_path / "r", name="r")
    running.run(experiment(ready), config, tmp_path / "r", name="r")
    steps, losses = zip(*runs.read(tmp_path / "r").losses, strict=True)
    assert steps == (1, 2, 3, 4, 5, 6, 7)
    np.testing.assert_allclose(losses, [loss for _, loss in want], rtol=2e-5)
