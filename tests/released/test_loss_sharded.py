"""Released steps of losses over a mesh of four devices: values, places, and errors."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.errors import OptimizerError
from tests.released import test_frozen, test_loss
from tests.shared import children, meshes
from tests.shared.marks import slow

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]
PROGRAM = "tests.programs.sharded_losses"


@pytest.mark.parametrize(("how", "count"), [(("some",), 6), slow((), 26)], ids=["some", "every"])
def test_four_devices_use_the_gradients_of_one(how, count):
    found = children.printed(children.with_cpus(4), PROGRAM, *how)
    assert found["devices"] == 4
    assert len(found["found"]) == count
    for case in found["found"]:
        assert case["params"] <= 1e-12, case
        assert case["losses"] <= 1e-12, case
        assert case["aux"] <= 1e-12, case
        assert case["moved"] > 1e-3, case
        # A state of NumPy arrays, made layer by layer, is the first state in its places.
        assert case["created"] is (None if "Python loop" in case["model"] else True), case
        assert ("pinned_host" in case["places"]) == (case["persist"] is not None)
        # Of the arrays with several axes, the embedding of LoRA's model alone is never divided.
        share = {"nothing": 0, "moments": 0.4, "states": 1, "layers": 0.9}[case["divided"]]
        assert case["parts"] >= share
        assert case["divided"] != "nothing" or not case["parts"]


def step_of(loss=test_loss.with_a_counter, **options):
    return jaxmem.released_step(optax.adamw(0.01), loss, axis_name="data", **options)


def in_a_loop():
    loss, params, _ = test_loss.converted_in_a_loop(None)
    return step_of(loss), params


def in_a_scan():
    return step_of(), test_loss.layer_parameters()


@pytest.mark.parametrize("made", [in_a_loop, in_a_scan])
def test_a_call_without_a_mesh_is_refused(made):
    step, params = made()
    state = step.init(params, test_loss.rows())
    with pytest.raises(OptimizerError, match="data_parallel"):
        jax.jit(step)(state, test_loss.rows())


@pytest.mark.parametrize("made", [in_a_loop, in_a_scan])
def test_a_mesh_without_the_axis_is_refused(made):
    step, params = made()
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    with pytest.raises(OptimizerError, match="'data', and `mesh` has 'model'"):
        step.data_parallel(mesh)
    with pytest.raises(OptimizerError, match="'data', and `mesh` has 'model'"):
        step.of(params, test_loss.rows()).data_parallel(mesh)


def test_a_batch_that_devices_cannot_divide_is_refused():
    step, params = in_a_scan()
    state = step.init(params, test_loss.rows())
    with pytest.raises(OptimizerError, match=r"\(8, 16\).* 3 divides"):
        step.data_parallel(meshes.abstract(3))(state, test_loss.rows())


def test_states_of_layers_in_a_python_loop_are_not_divided():
    step, params = in_a_loop()
    bound = step.of(params, test_loss.rows())
    for divided in ("states", "layers", "moments"):
        with pytest.raises(OptimizerError, match="Python loop"):
            bound.specs(params, 2, divided)
    assert {*jax.tree.leaves(bound.specs(params, 2))} == {meshes.WHOLE}


def test_specs_of_frozen_parameters():
    """The devices divide frozen layers if layers are gathered one at a time, and nothing else that
    is frozen."""
    params = test_frozen.lora_parameters()
    step = step_of(test_frozen.with_lora, trainable=test_frozen.of_names(test_frozen.TRAINED))
    bound = step.of(params, test_frozen.batch())
    frozen = {"coded", "down", "scale", "up"}
    for divided in ("nothing", "states", "layers"):
        specs, _ = bound.specs(params, 2, divided)
        assert jax.tree.structure(specs) == jax.tree.structure(params)
        over = {name for name, spec in specs["layers"].items() if "data" in spec}
        of_layers = {"nothing": set(), "states": {"a", "b"}, "layers": {"a", "b"} | frozen}
        assert over == of_layers[divided]
        assert specs["embedding"] == specs["gain"] == meshes.WHOLE
        assert ("data" in specs["head"]) == (divided != "nothing")


def test_one_device_alone_keeps_its_batch():
    """`devices` of `of` divides the batch, and the loss is traced for a part of it."""
    rows = []

    def loss(params, x):
        rows.append(x.shape[0])
        return test_loss.with_a_counter(params, x)

    params, batch = test_loss.layer_parameters(), jnp.concatenate([test_loss.rows()] * 2)
    step_of(loss).of(params, batch)
    step_of(loss).of(params, batch, devices=4)
    assert rows == [16, 4]
