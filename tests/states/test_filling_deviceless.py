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
from jaxmem._states.layout import filling
from jaxmem._xla.deviceless import Compiler
from tests.shared.deviceless import result

pytestmark = pytest.mark.jax_defaults
LAYERS = 6


@pytest.fixture(scope="module")
def h200():
    with Compiler("h200", workers=1) as compiler:
        yield compiler


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


@pytest.mark.parametrize(
    "layer",
    [drawn, of_a_model("gpt_nano"), of_a_model("llama_nano")],
    ids=["drawn", "gpt", "llama"],
)
def test_one_layer_is_held_beside_the_states(layer, h200):
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    number = jax.ShapeDtypeStruct((), jnp.int32)
    one = jax.eval_shape(layer, number)
    stacked = lambda a: jax.ShapeDtypeStruct((LAYERS, *a.shape), a.dtype, sharding=host)
    stacks = jax.tree.map(stacked, one)
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(one))
    # Something must lie on the device, for its mesh: the number of the first layer.
    fill = lambda stacks, first: filling(lambda i: layer(first + i), LAYERS)(stacks)
    found = result(h200, fill, stacks, number, donate=0)
    assert found.host_bytes == LAYERS * size
    assert found.temp_bytes < 1.02 * size
    assert found.argument_bytes + found.output_bytes - found.alias_bytes < 1024
    assert {(t.how, t.to_host) for t in found.transfers} == {("dma", True)}
    assert sum(t.nbytes * t.runs for t in found.transfers) == LAYERS * size
