"""Predicted times of steps whose shardings, and no plan, ask for transfers between GPUs: fully
sharded parameters, and tensor parallelism.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem._target.deviceless import gpu
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.devices.chips import GPUS
from jaxmem._target.devices.rates import LINK_EFFICIENCY
from tests.shared.deviceless import result, spec

pytestmark = pytest.mark.usefixtures("own_processes")
LAYERS, ROWS, D, F = 4, 512, 512, 2048
FSDP = AbstractMesh((4, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
TENSOR = AbstractMesh((1, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
THIN = 1 / 500  # of the rate between GPUs: no kernel hides what crosses
RATE = THIN * LINK_EFFICIENCY * GPUS["h200"].peers


@pytest.fixture(scope="module")
def seconds_on() -> Iterator[Callable]:
    """A function of a share of the rate between GPUs, a mesh and a step: the predicted seconds."""
    with pytest.MonkeyPatch.context() as patch:
        links, compilers = gpu.links, {}

        def seconds(share: float, mesh: AbstractMesh, step) -> float:
            thinner = lambda target, chip: dataclasses.replace(
                links(target, chip), peers=share * links(target, chip).peers
            )
            patch.setattr(gpu, "links", thinner)
            if share not in compilers:
                compilers[share] = Compiler("h200:4", workers=1)
            found = result(compilers[share], step, *arguments(mesh))
            assert found.xla_seconds is not None
            return found.xla_seconds

        yield seconds
        for compiler in compilers.values():
            compiler.close()


def arguments(mesh: AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    place = lambda *axes: NamedSharding(mesh, P(*axes))
    half = jnp.bfloat16
    return [
        spec(LAYERS, D, F, dtype=half, sharding=place(None, "fsdp", "tensor")),
        spec(LAYERS, F, D, dtype=half, sharding=place(None, "tensor", "fsdp")),
        spec(ROWS, D, dtype=half, sharding=place("fsdp", None)),
    ]


def step(policy) -> Callable:
    """The gradients of layers of two products each, which a policy saves or not."""

    def layer(x, weights):
        up, down = weights
        return jnp.sin(jnp.sin(x @ up) @ down), None

    def loss(up, down, x):
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.lax.scan(body, x, (up, down))[0].astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1))


NOTHING = step(jax.checkpoint_policies.nothing_saveable)
PRODUCTS = step(jax.checkpoint_policies.dots_saveable)


def test_a_fully_sharded_step_is_slower_over_thinner_links(seconds_on):
    fast, slow = (seconds_on(share, FSDP, NOTHING) for share in (1, THIN))
    # Each layer's weights are gathered in the forward and in the backward, and their gradients are
    # scattered: 3/4 of their bytes cross each time.
    crossing = 3 * LAYERS * 3 / 4 * 2 * 2 * D * F
    assert 0.95 * crossing < (slow - fast) * RATE < 1.5 * crossing


def test_recomputing_a_tensor_parallel_layer_costs_its_all_reduce(seconds_on):
    """More than its FLOPs say: the layer's forward sums a product's parts over all devices."""
    more = {
        share: seconds_on(share, TENSOR, NOTHING) - seconds_on(share, TENSOR, PRODUCTS)
        for share in (1, THIN)
    }
    assert more[THIN] > more[1]
    reduced = LAYERS * 2 * 3 / 4 * 2 * ROWS * D  # bytes that cross again
    assert more[THIN] - more[1] == pytest.approx(reduced / RATE, rel=0.1)
