"""A GPT trained by the command with its states in host memory: the losses of a resident run, and a
run that goes on under another placement.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import train
from experiments.command.load import load
from experiments.errors import InputError
from experiments.running.planning import prepare
from experiments.running.text import TEXT
from experiments.steps.step import init_state, joined, placed
from tests.experiments.states import user_numerics
from tests.shared.marks import slow

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compiles")]

SETTINGS = (
    "model.layers=3", "model.width=32", "model.heads=2", "model.loop=stack", "model.dropout=0.0",
    "train.steps=4", "train.batch=8", "train.microbatches=2", "train.sequence=64",
    "train.loss_chunk=32", "train.eval_batches=1", "optimizer.warmup=1",
    "optimizer.accumulation=released", "optimizer.clip=component", "plan.budget=none",
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(
        "".join(f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(400))
    )
    return f"data.path={path}"


def losses(out, *settings):
    """The loss of each step and the validation loss, of a run by the command."""
    assert train.main(["gpt_nano", *SETTINGS, *settings, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows] + [
        json.loads((out / "summary.json").read_text())["val_loss"]
    ]


@pytest.fixture(scope="module")
def resident(text, tmp_path_factory):
    with user_numerics():
        return losses(tmp_path_factory.mktemp("runs") / "resident", text)


@pytest.mark.parametrize("persist", [1, slow(0), slow(3)])
def test_losses_are_those_of_a_resident_run(persist, resident, text, tmp_path):
    got = losses(tmp_path / "out", text, f"states.persist={persist}")
    assert got[-1] < got[0]
    np.testing.assert_allclose(got, resident, rtol=1e-6)


@pytest.mark.parametrize("name", ["lion", slow("sgd")])
def test_other_optimizers_stream_too(name, text, tmp_path):
    settings = text, "train.microbatches=1", f"optimizer.name={name}"
    want = losses(tmp_path / "resident", *settings)
    got = losses(tmp_path / "streamed", *settings, "states.persist=1")
    assert got[-1] < got[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def steps(config, state, numbers):
    data, found = TEXT.read(config), []
    step = prepare(config).step
    for number in numbers:
        state, metrics = step(state, TEXT.batch(config, data, number))
        found.append(float(metrics["loss"]))
    return state, found


def test_a_run_goes_on_from_the_joined_form_under_another_placement(text, resident):
    """What a checkpoint would hold: NumPy's arrays, of no place."""
    config = lambda *settings: load("gpt_nano", (*SETTINGS, text, *settings))
    one, two = (config(f"states.persist={persist}") for persist in (1, 2))
    state, first = steps(one, TEXT.first_state(one), (1, 2))
    saved = jax.tree.map(np.asarray, joined(one, state))
    shapes = jax.eval_shape(functools.partial(init_state, config()))
    like = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert like(saved) == like(shapes)
    _, last = steps(two, placed(two, jax.tree.map(jnp.asarray, saved)), (3, 4))
    np.testing.assert_allclose(first + last, resident[:4], rtol=1e-6)


def test_a_plan_is_refused_beside_it():
    streamed = ("model.loop=stack", "optimizer.accumulation=released", "states.persist=1")
    with pytest.raises(InputError, match=r"plan\.budget: got '100MB' beside states\.persist"):
        load("gpt_nano", streamed)
