"""Meshes: a model over several devices has the losses of one device."""

import numpy as np
import pytest

from tests.shared import children

pytestmark = pytest.mark.jax_defaults
NANO = "gpt_nano plan.budget=none train.sequence=64"
MICRO = (
    "model.layers=2 model.width=16 model.heads=2 train.sequence=16 train.loss_chunk=8 train.steps=8"
    " optimizer.warmup=2"
)
MESHES = {
    (4, 1, 1): "mesh.data=4",
    (1, 4, 1): "mesh.fsdp=-1",
    (2, 1, 2): "mesh.data=2 mesh.tensor=2",
    (1, 2, 2): "mesh.fsdp=2 mesh.tensor=2",
}


@pytest.fixture(scope="module")
def trains(text):
    """Trains by settings on four devices."""
    path = text.removeprefix("data.path=")

    def train(steps, *settings):
        return children.printed(
            children.with_cpus(4), "tests.programs.meshed", steps, path, *settings
        )

    return train


def farthest(one, other):
    """The largest relative difference of two runs' losses."""
    return float(abs(np.array(one["losses"]) / np.array(other["losses"]) - 1).max())


def test_a_gpt_over_a_mesh_has_the_losses_of_one_device(trains):
    micro = f"gpt_nano plan.budget=none {MICRO}"
    alone, divided = trains(3, micro, f"{micro} mesh.fsdp=2 mesh.tensor=2 mesh.sequence=true")
    assert (alone["share"], divided["share"] < 0.4) == (1, True), divided
    assert min(alone["moved"], divided["moved"]) > 1e-4
    assert farthest(divided, alone) < 1e-6


@pytest.mark.slow
def test_fifty_steps_over_all_meshes_have_the_losses_of_one_device(trains):
    alone, *divided = trains(50, NANO, *(f"{NANO} {mesh}" for mesh in MESHES.values()))
    assert alone["losses"][-1] < 0.6 * alone["losses"][0]
    found = {mesh: farthest(one, alone) for mesh, one in zip(MESHES, divided)}
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_nano", "llama_nano"])
@pytest.mark.parametrize(
    "way",
    [
        "plan.budget=none mesh.axes=explicit",
        "plan.budget=none mesh.sequence=true",
        "remat.policy=nothing_saveable",
        "plan.budget=none optimizer.accumulation=in_place model.loop=stack train.microbatches=2",
        "plan.budget=none optimizer.accumulation=adama train.microbatches=2"
        " optimizer.second_moment=row",
        "plan.budget=none optimizer.moments=int8",
    ],
)
def test_each_way_to_train_over_a_mesh_has_the_losses_of_one_device(trains, name, way):
    settings = f"{name} {MICRO} {way}"
    alone = " ".join(word for word in settings.split() if not word.startswith("mesh."))
    one, divided = trains(5, alone, f"{settings} mesh.fsdp=2 mesh.tensor=2")
    assert farthest(divided, one) < 1e-5
    assert divided["share"] < 0.45
    if "explicit" in way:
        assert "@fsdp" in divided["type"]


@pytest.mark.slow
def test_a_planned_step_over_a_mesh_keeps_its_budget_and_the_losses(trains):
    unplanned = f"gpt_nano {MICRO} plan.budget=none"
    planned = f"gpt_nano {MICRO} plan.budget=280KB plan.actions=lossless mesh.fsdp=2 mesh.tensor=2"
    one, divided = trains(5, unplanned, planned)
    compiled, everything_kept = divided["bytes"]
    assert compiled <= 280_000 < everything_kept < one["bytes"][0] / 2
    assert farthest(divided, one) < 1e-5


@pytest.mark.slow
def test_a_plan_divides_the_states_of_a_run(trains):
    """ZeRO, as the plan decides."""
    released = (
        f"gpt_nano {MICRO} model.loop=stack optimizer.accumulation=released optimizer.clip=none"
        " model.dropout=0.0"
    )
    decide = 'plan.decide=["actions","states","sharding"] plan.budget=600KB'
    one, divided = trains(4, f"{released} plan.budget=none", f"{released} {decide}")
    assert farthest(divided, one) < 1e-5
