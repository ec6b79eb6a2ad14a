"""A GPT trained by the command with its states in host memory: the losses of a resident run, and a
run that goes on under another placement.
"""

import jax
import numpy as np
import pytest

from experiments import train
from experiments.command.load import load
from experiments.running import planning
from experiments.running.planning import prepare
from experiments.steps.step import abstract
from jaxmem._target.devices.support import host_loop_fault
from jaxmem._target.devices.target import Target
from jaxmem.plans import Plan
from tests.experiments.states import read_run, user_numerics
from tests.shared.marks import slow
from tests.shared.streamed import host_bytes

MISREADS = pytest.mark.skipif(
    host_loop_fault(Target.parse("h200")) is not None,
    reason="jaxlib reads host stacks wrongly on GPUs",
)

SETTINGS = (
    "model.layers=3", "model.width=32", "model.loop=stack",
    "train.steps=4", "train.batch=8", "train.microbatches=2", "train.sequence=64",
    "train.loss_chunk=32", "train.eval_batches=1", "optimizer.warmup=1", "sample.length=0",
    "optimizer.accumulation=released", "optimizer.clip=component", "plan.budget=none",
)  # fmt: skip
MODELS = {
    "gpt": ("gpt_nano", "model.heads=2", "model.dropout=0.0"),
    "llama": ("llama_nano", "model.hidden=96"),
    "bert": ("gpt_nano", "model.heads=2", "model.kind=bert", "model.vocab=257"),
}


@pytest.fixture(scope="module", autouse=True)
def threefry(quickly):
    """The generator that users have. The one of other tests draws other numbers of several keys at
    once than of each alone.
    """
    jax.config.update("jax_default_prng_impl", "threefry2x32")


def line_of(model: str, *settings) -> list[str]:
    name, *own = MODELS[model]
    return [name, *SETTINGS, *own, *settings]


def losses(out, *settings, model="gpt"):
    """The loss of each step and the validation loss, of a run by the command."""
    assert train.main([*line_of(model, *settings), "--out", str(out)]) == 0
    summary, rows = read_run(out)
    return [*(row["loss"] for row in rows), summary["val_loss"]]


@pytest.fixture(scope="module")
def resident(text, tmp_path_factory):
    with user_numerics():
        return losses(tmp_path_factory.mktemp("runs") / "resident", text)


@pytest.mark.slow
@pytest.mark.parametrize("persist", [1, slow(0), slow(3)])
def test_losses_are_those_of_a_resident_run(persist, resident, text, tmp_path):
    got = losses(tmp_path / "out", text, f"states.persist={persist}")
    assert got[-1] < got[0]
    np.testing.assert_allclose(got, resident, rtol=1e-6)


def check_plan(plan, config):
    """It keeps a budget that everything kept exceeds, and counts states where they lie."""
    assert plan.compiled_bytes <= plan.budget_bytes < plan.baseline_bytes
    state = abstract(config)[0]
    there = host_bytes(state)
    whole = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    assert plan.host_bytes >= there > 0
    assert whole - there <= plan.parts.arguments < whole


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU copies host stacks")
def test_a_plan_says_where_states_lie_and_the_run_trains_so(resident, text, tmp_path):
    decide = 'plan.decide=["actions", "states"]'
    got = losses(tmp_path / "out", text, decide, "plan.budget=1.85MB", "plan.actions=lossless")
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.compiled_bytes <= plan.budget_bytes
    assert plan.places.persist < 3
    assert plan.host_bytes > 0
    np.testing.assert_allclose(got, resident, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "persist", "target", "budget"),
    [
        ("gpt", 0, "local", "4.8MB"),
        ("llama", 0, "local", "4.8MB"),
        pytest.param("gpt", 1, "h200", "6MB", marks=MISREADS),
    ],
)
def test_activations_are_planned_beside_states_that_stream(
    model, persist, target, budget, resident, tmp_path, text
):
    """Losses are those of a resident run."""
    settings = (
        text, f"states.persist={persist}", "plan.actions=lossless", f"plan.target={target}",
        f"plan.budget={budget}",
    )  # fmt: skip
    want = resident if model == "gpt" else losses(tmp_path / "resident", text, model=model)
    got = losses(tmp_path / "out", *settings, model=model)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    name, *line = line_of(model, *settings)
    check_plan(Plan.load(tmp_path / "out" / "plan.json"), load(name, line))


RELEASED = ("optimizer.accumulation=released", "optimizer.clip=component", "model.loop=stack")


@pytest.mark.quick("how1")
@pytest.mark.parametrize(
    "how",
    [(*RELEASED, "plan.budget=none", "states.persist=1"), ("remat.policy=nothing_saveable",)],
)
def test_a_step_without_a_plan_is_compiled_with_the_options_of_its_copies(how, text, monkeypatch):
    asked = []

    def options(step, *shapes):
        asked.append(shapes)
        return {"no_such_option": True}

    monkeypatch.setattr(planning, "compiler_options", options)
    small = "model.layers=2", "model.width=32", "train.batch=8", "train.sequence=64"
    config = load("gpt_nano", [*small, *MODELS["gpt"][1:], *how, text])
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        prepare(config)
    assert asked == [abstract(config)]
