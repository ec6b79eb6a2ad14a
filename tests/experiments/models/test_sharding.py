"""The rules of a mesh: each parameter has one, and its moments follow it."""

import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P

from experiments.command.load import load
from experiments.config.images import ImageConfig
from experiments.config.sections import Mesh
from experiments.errors import InputError
from experiments.models import sharding
from experiments.steps import images
from experiments.steps.step import init_state

SHAPE = {"data": 2, "fsdp": 2, "tensor": 2, "expert": 1}


@pytest.fixture(params=["gpt_nano", "llama_nano", "bert_base"])
def states(request):
    """A state's shapes, and its rules, by their paths."""
    config = load(request.param, ["model.width=128", "model.heads=4"])
    return divided(jax.eval_shape(functools.partial(init_state, config)))


def divided(state, shape=None):
    rules = sharding.specs(state, shape or SHAPE)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    specs = jax.tree.leaves(rules, is_leaf=lambda a: isinstance(a, P))
    return {jax.tree_util.keystr(path): (a, spec) for (path, a), spec in zip(leaves, specs)}


def test_fsdp_divides_every_matrix_and_its_moments(states):
    matrices = 0
    for path, (array, spec) in states.items():
        is_layer = "blocks" in path
        if array.ndim != 2 + is_layer:
            continue
        matrices += 1
        assert "fsdp" in tuple(spec), path
        assert not is_layer or spec[0] is None, path
    assert matrices > 3 * 5, "parameters and two moments"


def test_tensor_divides_the_features_inside_a_layer_alone(states):
    for path, (array, spec) in states.items():
        if "blocks" not in path or "kernel" not in path:
            continue
        inside = 1 if any(name in path for name in ("proj", "down")) else 2
        assert spec[inside] == "tensor", path
        assert spec[3 - inside] == "fsdp", path
        assert array.shape[3 - inside] == 128, "the width, which tensor does not divide"


def test_expert_divides_the_experts_and_their_moments():
    shape = SHAPE | {"expert": 2}
    found = divided(jax.eval_shape(functools.partial(init_state, load("gpt_moe_nano"))), shape)
    experts = {path: spec for path, (_, spec) in found.items() if "experts" in path}
    assert len(experts) == 5 * 3
    assert all((spec[1] == "expert") == ("router" not in path) for path, spec in experts.items())
    assert not any(
        "expert" in tuple(spec) for path, (_, spec) in found.items() if path not in experts
    )


def test_fsdp_divides_every_convolution_and_its_moments():
    config = load("resnet50_digits", (), ImageConfig)
    found = divided(jax.eval_shape(functools.partial(images.init_state, config)))
    matrices = {path: spec for path, (array, spec) in found.items() if array.ndim > 1}
    assert len(matrices) == 3 * (53 + 1), "convolutions and the head; parameters and two moments"
    assert [path for path, spec in matrices.items() if "fsdp" not in tuple(spec)] == []
    assert all(spec == P() for _, (array, spec) in found.items() if array.ndim < 2)


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ({"data": -1}, 8, (8, 1, 1, 1)),
        ({"fsdp": -1, "tensor": 2}, 8, (1, 4, 2, 1)),
        ({"data": 2, "fsdp": 2, "expert": 2}, 8, (2, 2, 1, 2)),
    ],
)
def test_the_rest_of_the_devices_is_one_axis(mesh, devices, expected):
    assert sharding.sizes(Mesh(**mesh), devices) == expected


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"data": 3}, 2, "at most 2"),
        ({"fsdp": -1, "tensor": 3}, 8, "a divisor of 8"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(mesh, devices, message):
    with pytest.raises(InputError, match=f"mesh: got .*allowed: .*{message}"):
        sharding.sizes(Mesh(**mesh), devices)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("train.batch=6", "train.batch: got 6; allowed .* a multiple of 4"),
        ("train.microbatches=4", "train.batch: got 2 in a microbatch; allowed"),
        ("model.width=127", "model.width: got 127; allowed with"),
        ("model.heads=1", "model.heads: got 1; allowed with"),
    ],
)
def test_a_dimension_that_no_axis_divides_is_refused(setting, key):
    divided = [f"mesh.{name}={size}" for name, size in SHAPE.items()]
    config = load("gpt_nano", ["model.heads=2", *divided])
    section, _, value = setting.partition("=")
    name, key_of = section.split(".")
    changed = getattr(config, name).model_copy(update={key_of: int(value)})
    config = config.model_copy(update={name: changed})
    with pytest.raises(InputError, match=key):
        sharding.check(config, 8)


def test_without_a_mesh_nothing_is_divided():
    assert sharding.over(Mesh()) is None
    assert sharding.shardings({"embedding": jax.ShapeDtypeStruct((4, 4), "float32")}) is None
    x = object()
    assert sharding.constrain(x, "x_BSD") is x
