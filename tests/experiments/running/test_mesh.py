"""Meshes: a model over several devices has the losses of one device."""

import jax
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
    """Trains by settings on four devices, or on `devices`."""

    def train(steps, *settings, devices=4):
        own = "resnet", "data.path"
        told = [one if any(word in one for word in own) else f"{one} {text}" for one in settings]
        environment = children.with_cpus(devices)
        return children.printed(environment, "tests.programs.meshed", steps, *told)

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


def are_one(alone, divided, share):
    """Whether a run over a mesh, whose devices have at most `share` of the state, is one device's
    run.
    """
    assert min(alone["moved"], divided["moved"]) > 1e-6
    assert divided["share"] <= share <= alone["share"]
    assert farthest(divided, alone) < 1e-5
    found = (jax.tree.leaves(one["found"]) for one in (divided, alone))
    np.testing.assert_allclose(*found, rtol=1e-5)


EIGHT = "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"
BERT = f"model.dtype=float32 model.vocab=260 {MICRO} train.batch=8 train.microbatches=2"
RESNET = (
    "resnet50_digits model.depth=14 model.width=4 train.batch=16 train.microbatches=2 train.steps=8"
    " optimizer.warmup=2 train.eval_batches=3"
)


def test_a_bert_over_a_mesh_has_the_losses_of_one_device(trains):
    micro = f"bert_base {BERT} train.eval_batches=2"
    scan = f"{micro} model.loop=scan optimizer.accumulation=scan optimizer.clip=norm"
    alone, divided = trains(3, scan, f"{scan} mesh.fsdp=2 mesh.tensor=2")
    are_one(alone, divided, 0.35)


def test_a_mixture_of_experts_over_a_mesh_has_the_losses_of_one_device(trains):
    micro = f"gpt_moe_nano plan.budget=none {MICRO}"
    alone, divided = trains(3, micro, f"{micro} mesh.expert=2 mesh.data=2")
    are_one(alone, divided, 0.7)


@pytest.mark.slow
def test_fifty_steps_of_a_mixture_over_its_meshes_have_the_losses_of_one_device(trains):
    nano = "gpt_moe_nano plan.budget=none train.sequence=64"
    meshes = "mesh.expert=2 mesh.data=2", "mesh.expert=4"
    alone, *divided = trains(50, nano, *(f"{nano} {mesh}" for mesh in meshes))
    assert alone["losses"][-1] < 0.6 * alone["losses"][0]
    found = {mesh: farthest(one, alone) for mesh, one in zip(meshes, divided)}
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "plan.budget=2MB plan.actions=lossless"])
def test_a_released_bert_over_eight_devices_has_the_losses_of_one(trains, way):
    micro = f"bert_base {BERT} train.eval_batches=2"
    alone, divided = trains(3, micro, f"{micro} {EIGHT} {way}", devices=8)
    are_one(alone, divided, 0.35)


@pytest.mark.slow
def test_a_task_of_glue_over_a_mesh_has_the_losses_and_scores_of_one_device(trains, tmp_path):
    (tmp_path / "RTE").mkdir()
    for side, count in (("train", 32), ("dev", 13)):  # the last batch is short
        lines = [f"{i}\ta{i % 5}\tb{i % 3}\t{'not_' * (i % 2)}entailment\n" for i in range(count)]
        named = "index\tsentence1\tsentence2\tlabel\n"
        (tmp_path / "RTE" / f"{side}.tsv").write_text("".join([named, *lines]))
    words = [w for w in BERT.split() if not w.startswith("train.loss_chunk")]
    micro = f"bert_glue {' '.join(words)} optimizer.learning_rate=1e-3 data.path={tmp_path}"
    alone, divided = trains(3, micro, f"{micro} mesh.data=2 mesh.fsdp=2", devices=8)
    are_one(alone, divided, 0.6)


@pytest.mark.quick("mesh.data=4 mesh.fsdp=2")
@pytest.mark.parametrize("mesh", ["mesh.data=8", "mesh.fsdp=8", "mesh.data=4 mesh.fsdp=2"])
def test_a_resnet_over_a_mesh_has_the_losses_of_one_device(trains, mesh):
    """Each device has one image of a microbatch, whose own variance says nothing of the batch's."""
    alone, divided = trains(4, RESNET, f"{RESNET} {mesh}", devices=8)
    are_one(alone, divided, 1.0 if "data=8" in mesh else 0.7)


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
