"""A GPT trained by the command with its states in host memory: the losses of a resident run, and a
run that goes on under another placement.
"""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import train
from experiments.command.load import load
from experiments.running import planning
from experiments.running.planning import new_plan, prepare
from experiments.running.text import TEXT
from experiments.steps.step import abstract, first_state, init_state, joined, placed
from jaxmem._target.devices.support import host_loop_fault
from jaxmem._target.devices.target import Target
from jaxmem.plans import Plan
from tests.experiments.states import user_numerics
from tests.shared.marks import slow

pytestmark = pytest.mark.jax_defaults
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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(
        "".join(f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(400))
    )
    return f"data.path={path}"


def losses(out, *settings, model="gpt"):
    """The loss of each step and the validation loss, of a run by the command."""
    name, *own = MODELS[model]
    assert train.main([name, *SETTINGS, *own, *settings, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows] + [
        json.loads((out / "summary.json").read_text())["val_loss"]
    ]


def where(a):
    return a.shape, a.dtype, a.sharding


def config_of(model: str, *settings):
    name, *own = MODELS[model]
    return load(name, (*SETTINGS, *own, *settings))


def arrays(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("persist", [1, slow(0), slow(3)])
@pytest.mark.parametrize("model", ["gpt", slow("llama"), slow("bert")])
def test_the_first_state_is_made_in_its_places_as_the_resident_one_is_drawn(model, persist):
    config = config_of(model, f"states.persist={persist}")
    made = first_state(config)
    moved = placed(config, jax.jit(functools.partial(init_state, config))())
    where = lambda a: (a.shape, a.dtype, a.sharding)
    assert jax.tree.map(where, made) == jax.tree.map(where, moved)
    jax.tree.map(np.testing.assert_array_equal, *arrays((made, moved)))
    drawn = [a for a in jax.tree.leaves(arrays(joined(config, made).params["blocks"])) if a.std()]
    assert drawn
    assert all(len({layer.tobytes() for layer in a}) == 3 for a in drawn), "layers differ"


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


@pytest.mark.parametrize(
    ("model", "n", "persist", "other"),
    [("gpt", 1, 0, 1), slow("gpt", 4, 1, 2), slow("llama", 1, 1, 3), slow("llama", 4, 2, 0)],
)
def test_a_run_goes_on_from_the_joined_form(model, n, persist, other, text):
    """What a checkpoint would hold: NumPy's arrays, of no place. Under the same placement losses
    are the same to the last bit, under another one within rounding.
    """
    config = lambda persist: config_of(
        model, text, f"train.microbatches={n}", f"states.persist={persist}"
    )
    same, changed = config(persist), config(other)
    data = TEXT.read(same)

    def trained(step, state, numbers):
        found = []
        for number in numbers:
            state, metrics = step(state, TEXT.batch(same, data, number))
            found.append(float(metrics["loss"]))
        return state, found

    step = prepare(same).step
    state, first = trained(step, TEXT.first_state(same, None), (1, 2))
    # Copies, since arrays that move are deleted where they were.
    saved = jax.tree.map(np.array, joined(same, state))
    shapes = jax.eval_shape(functools.partial(init_state, same))
    like = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert like(saved) == like(shapes)
    restored = lambda config: placed(config, jax.tree.map(jnp.asarray, saved))
    whole = trained(step, TEXT.first_state(same, None), (1, 2, 3, 4))[1]
    assert whole[:2] == first
    assert trained(step, restored(same), (3, 4))[1] == whole[2:]
    got = trained(prepare(changed).step, restored(changed), (3, 4))[1]
    np.testing.assert_allclose(got, whole[2:], rtol=1e-6)
    assert len(set(whole)) == 4


def check_plan(plan, config):
    """It keeps a budget that everything kept exceeds, and counts states where they lie."""
    assert plan.compiled_bytes <= plan.budget_bytes < plan.baseline_bytes
    size = lambda arrays: sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    leaves = jax.tree.leaves(abstract(config)[0])
    there = [a for a in leaves if a.sharding.memory_kind == "pinned_host"]
    assert there
    here = [a for a in leaves if a.sharding.memory_kind != "pinned_host"]
    assert plan.host_bytes >= size(there)
    assert size(here) <= plan.parts.arguments < size(leaves)


def test_states_that_stream_count_in_a_plan():
    small = "model.layers=2", "train.microbatches=1", "train.batch=4", "plan.actions=lossless"
    config = config_of("gpt", *small, "states.persist=0", "plan.budget=3MB")
    check_plan(new_plan(config), config)


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
    check_plan(Plan.load(tmp_path / "out" / "plan.json"), config_of(model, *settings))


RELEASED = ("optimizer.accumulation=released", "optimizer.clip=component", "model.loop=stack")


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
