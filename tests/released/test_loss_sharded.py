"""Released steps of losses over a mesh of four devices: values, places, and errors."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import OptimizerError
from tests.released import test_frozen, test_loss
from tests.shared import children, meshes
from tests.shared.marks import slow

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]
PROGRAM = "tests.programs.sharded_losses"


@pytest.mark.parametrize(("how", "count"), [(("some",), 7), slow((), 35)], ids=["some", "every"])
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


@pytest.mark.slow
@pytest.mark.parametrize("divided", ["nothing", "layers"])
def test_losses_of_other_libraries_train_on_four_devices_as_on_one(divided):
    found = children.printed(children.with_cpus(4), "tests.programs.foreign_over_mesh", divided)
    assert found["devices"] == 4
    assert found["found"].keys() == test_loss.MODELS.keys()
    for name, case in found["found"].items():
        # GPT-2 computes in float32, and one loss converts its stacks.
        close = {"GPT-2": 1e-6, "converted stacks": 1e-8}.get(name, 1e-12)
        assert case["far"] <= close < case["moved"], (name, case)


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
    with pytest.raises(OptimizerError, match="`mesh` is int; expected a jax.sharding.Mesh"):
        step.data_parallel(4)
    with pytest.raises(OptimizerError, match="'data', and `mesh` has 'model'"):
        step.data_parallel(mesh)
    with pytest.raises(OptimizerError, match="'data', and `mesh` has 'model'"):
        step.of(params, test_loss.rows()).data_parallel(mesh)


def test_a_batch_that_devices_cannot_divide_is_refused():
    step, params = in_a_scan()
    state = step.init(params, test_loss.rows())
    with pytest.raises(OptimizerError, match=r"\(8, 16\).* 3 devices"):
        step.data_parallel(meshes.abstract(3))(state, test_loss.rows())


def test_layers_of_a_python_loop_are_divided_one_at_a_time_alone():
    step, params = in_a_loop()
    bound = step.of(params, test_loss.rows())
    for divided in ("states", "moments"):
        with pytest.raises(OptimizerError, match="Python loop"):
            bound.specs(params, 2, divided)
    assert {*jax.tree.leaves(bound.specs(params, 2))} == {meshes.WHOLE}
    of_params, of_moments = bound.specs(params, 2, "layers")
    assert all("data" in spec for spec in jax.tree.leaves(of_params))
    assert of_moments[0].mu == of_params


@pytest.mark.parametrize(
    "tx",
    [
        jaxmem.adama(0.1, axis_name="data", moments="int8"),
        jaxmem.adama(0.1, axis_name="data", second_moment="row"),
        optax.lamb(0.1),
        optax.adafactor(0.1),
    ],
    ids=["8 bits", "rows", "trust ratios", "factors"],
)
def test_an_update_that_needs_whole_arrays_is_not_divided(tx):
    loss, params, _ = test_loss.converted_in_a_loop(None)
    over = {} if hasattr(tx, "rule") else {"axis_name": "data"}
    bound = jaxmem.released_step(tx, loss, **over).of(params, test_loss.rows())
    with pytest.raises(OptimizerError, match="specs: "):
        bound.specs(params, 2, "layers")


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


@pytest.mark.jax_defaults
def test_layers_of_a_python_loop_are_gathered_one_at_a_time_on_absent_gpus():
    """XLA merges equal gathers of the forward and the backward unless they wait for other arrays,
    and then holds all layers.
    """
    layers, width = 12, 256
    one = {"up": (width, 4 * width), "down": (4 * width, width)}
    shape = lambda size: jax.ShapeDtypeStruct(size, jnp.float32)
    is_size = lambda a: isinstance(a, tuple)
    params = {"layers": [jax.tree.map(shape, one, is_leaf=is_size) for _ in range(layers)]}

    def loss(params, x):
        for p in params["layers"]:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return (x**2).mean()

    mesh, step = meshes.abstract(8), step_of(loss)
    x = meshes.shape(shape((64, width)), mesh, jax.sharding.PartitionSpec("data"))
    state = jax.eval_shape(step.init, params, x)
    specs = step.of(params, x).specs(params, 8, "layers")
    state = jax.tree.map(lambda a, spec: meshes.shape(a, mesh, spec), state, specs)
    divided = jax.jit(step.data_parallel(mesh, "layers"), donate_argnums=0)
    with backend_for(Target.parse("h200:8"), workers=1) as backend:
        stages = trace(lambda _: divided, None, (state, x))
        found = backend.compile_fully(*stages).result()
    a_layer = 2 * 4 * width * 4 * width
    arguments = 3 * layers * a_layer // 8
    assert arguments < found.total_bytes < arguments + 4 * a_layer
