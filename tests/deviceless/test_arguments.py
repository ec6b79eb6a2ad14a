"""Arguments of steps that are compiled for GPUs that are not there: of meshes and of one device, in
host memory, unused, and of every dtype.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.export import export_flat
from jaxmem.errors import StepError
from tests.shared.deviceless import D, M, result, spec


def test_arguments_in_host_memory_are_host_bytes(h200):
    mesh = AbstractMesh((1,), ("data",))
    device, host = (
        NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in ("device", "pinned_host")
    )

    def step(moments, x):
        new = jax.device_put(moments, jax.memory.Space.Device) * 2 + x.sum()
        return jax.device_put(new, jax.memory.Space.Host), x + 1

    compiled = result(h200, step, spec(M, D, sharding=host), spec(D, sharding=device), donate=0)
    assert compiled.host_bytes == 4 * M * D
    assert compiled.argument_bytes < 4 * M * D


@pytest.mark.parametrize("first", ["device", "mesh"])
def test_arguments_of_a_device_may_stand_beside_those_of_a_mesh(h200, first):
    """As arrays do that jax.jit made, beside states that were moved to host memory."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    device = SingleDeviceSharding(jax.devices()[0])
    shapes = {"mesh": spec(M, D, sharding=host), "device": spec(D, sharding=device)}

    def step(given):
        moved = jax.device_put(given["mesh"], jax.memory.Space.Device) + given["device"]
        return given | {"mesh": jax.device_put(moved, jax.memory.Space.Host)}

    ordered = {name: shapes[name] for name in (first, *(shapes.keys() - {first}))}
    flat = lambda *leaves: tuple(step(dict(zip(ordered, leaves)))[name] for name in ordered)
    compiled = result(h200, flat, *ordered.values(), donate=(0, 1))
    assert compiled.host_bytes == 4 * M * D


def test_keys_constants_doubles_and_unused_arguments(h200):
    table = jnp.arange(D, dtype=jnp.float32)

    def step(state, key):
        key, use = jax.random.split(key)
        noise = jax.random.normal(use, (D,), jnp.float32)
        return {
            "w": state["w"] + noise * table,
            "double": state["double"] * 2.0,
            "unused": state["unused"],
        }, key

    state = {"w": spec(D), "double": spec(3, dtype=jnp.float64), "unused": spec(7, dtype=jnp.int8)}
    traced = jax.jit(step, donate_argnums=0).trace(state, jax.random.key(0))
    exported, donated = export_flat(traced, "cuda")
    assert donated == (0, 1, 2)
    compiled = h200.submit(exported, donated=donated).result(timeout=120)
    assert compiled.argument_bytes >= 4 * D + 3 * 8 + 2 * 4


def test_four_devices_share_the_batch():
    mesh = AbstractMesh((4,), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def step(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    with Compiler("h200:4", workers=1) as compiler:
        args = spec(D, D, sharding=whole), spec(4 * M, D, sharding=split)
        compiled = result(compiler, step, *args, donate=0)
        assert compiled.argument_bytes == 4 * D * D + 4 * M * D
        assert compiled.alias_bytes == 4 * D * D
        assert compiled.matmul_flops == 2 * 2 * M * D * D
        assert compiled.xla_seconds > 0
        alone = result(compiler, step, spec(D, D), spec(4 * M, D))
        assert alone.argument_bytes == 4 * D * D + 4 * 4 * M * D
    with (
        Compiler("h200:2", workers=1) as compiler,
        pytest.raises(StepError, match=r"sharded over 4 devices.*has 2;.*a target of 4"),
    ):
        result(compiler, step, *args)
