"""States that are made a layer at a time, for a GPU that is not there: beside the states themselves
the device holds one layer, and the host nothing.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from experiments.command.load import load
from experiments.models import registry as models
from jaxmem._model.states.layout import filling
from jaxmem._model.states.shards import shards
from jaxmem._target.deviceless.compiler import Compiler
from tests.shared.deviceless import result
from tests.shared.marks import slow

LAYERS = 6


def drawn(i):
    """A layer of 3 MiB, in arrays that differ in size."""
    a, b, c = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 3)
    return {
        "up": jax.random.normal(a, (512, 1024)),
        "down": jax.random.normal(b, (256, 512)),
        "gate": jax.random.normal(c, (256, 512)).astype(jnp.bfloat16),
    }


def of_a_model(name):
    """A layer of an experiment's model, whose embedding is larger than all layers together."""
    config = load(name, ("model.vocab=50257", "model.width=128"))
    return lambda i: models.parts(config, jax.random.key(0))[1](i)


NUMBER = jax.ShapeDtypeStruct((), jnp.int32)  # of a layer


def nbytes(tree) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.quick("gpt")
@pytest.mark.parametrize(
    "layer",
    [drawn, of_a_model("gpt_nano"), slow(of_a_model("llama_nano"))],
    ids=["drawn", "gpt", "llama"],
)
def test_one_layer_is_held_beside_the_states(layer, h200):
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    one = jax.eval_shape(layer, NUMBER)
    stacked = lambda a: jax.ShapeDtypeStruct((LAYERS, *a.shape), a.dtype, sharding=host)
    stacks = jax.tree.map(stacked, one)
    size = nbytes(one)
    # Something must lie on the device, for its mesh: the number of the first layer.
    fill = lambda stacks, first: filling(lambda i: layer(first + i), LAYERS)(stacks)
    found = result(h200, fill, stacks, NUMBER, donate=0)
    assert found.host_bytes == LAYERS * size
    assert found.temp_bytes < 1.02 * size
    assert found.argument_bytes + found.output_bytes - found.alias_bytes < 1024
    assert {(t.how, t.to_host) for t in found.transfers} == {("dma", True)}
    assert sum(t.nbytes * t.runs for t in found.transfers) == LAYERS * size


@pytest.fixture(scope="module")
def eight_h200():
    with Compiler("h200:8", workers=1) as compiler:
        yield compiler


@pytest.mark.quick("drawn-auto-pinned_host", "drawn-explicit-device")
@pytest.mark.parametrize("kind", ["pinned_host", "device"])
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("layer", [drawn, slow(of_a_model("gpt_nano"))], ids=["drawn", "gpt"])
def test_a_device_holds_its_part_of_the_states_and_one_layer_beside(layer, axes, kind, eight_h200):
    mesh = AbstractMesh((8,), ("data",), axis_types=(axes,))
    place = lambda a, spec: jax.ShapeDtypeStruct(
        a.shape, a.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind)
    )
    one = jax.eval_shape(layer, NUMBER)
    whole = jax.tree.map(lambda a: jax.ShapeDtypeStruct((LAYERS, *a.shape), a.dtype), one)
    specs = shards(whole, 8, "data", first=1)
    # Something must lie on the devices, for their mesh.
    there = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    fill = lambda stacks, _: filling(layer, LAYERS, mesh, specs)(stacks)
    found = result(eight_h200, fill, jax.tree.map(place, whole, specs), there, donate=0)
    size = nbytes(one)
    parts = LAYERS * size // 8  # eight devices divide all of these arrays
    on_host = kind == "pinned_host"
    assert found.host_bytes == parts * on_host
    held = found.argument_bytes + found.output_bytes - found.alias_bytes
    assert held < parts * (not on_host) + 1024
    # No device makes more than its part of a layer: 16 KiB are for small arrays' alignment.
    assert found.temp_bytes < 1.02 * size / 8 + 2**14
    assert {(t.how, t.to_host) for t in found.transfers} == ({("dma", True)} if on_host else set())
    assert sum(t.nbytes * t.runs for t in found.transfers) == parts * on_host
