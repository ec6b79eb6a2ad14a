"""Released steps with optax's transformations over a mesh: eight devices are one with the whole
batch, whatever is divided over them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxmem._core.assignment import Assignment
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.hlo.transfers import fault
from jaxmem._trace.export import export_flat
from tests.shared import children, meshes, tiny_lm
from tests.shared.streamed import host_bytes


@pytest.fixture(scope="module")
def eight():
    """What eight devices find."""
    return children.printed(children.with_cpus(8), "tests.programs.sharded_direct")


def test_states_that_lie_whole_on_a_mesh_are_placed_and_divided(eight):
    """Their counters too, and what a transformation makes on one device."""
    assert eight["devices"] == 8
    assert len(eight["placed"]) == 2
    for found in eight["placed"].values():
        assert found["moved"] > 1e-3
        assert max(found["far"]) <= 1e-6


def test_eight_devices_are_one_with_the_whole_batch(eight):
    assert eight["devices"] == 8
    assert len(eight["found"]) == 4
    for label, found in eight["found"].items():
        # Relative to numbers of about 1.
        assert found["far"] <= 2e-6
        spec = "(None, 'data')" if "states" in label else "()"
        persist = int(label[-1])
        kinds = ["device"] * (persist > 0) + ["pinned_host"] * (persist < 4)
        assert found["places"] == [f"{kind} {spec}" for kind in kinds]


@pytest.mark.slow
@pytest.mark.jax_defaults
def test_each_gpu_holds_its_part_in_its_host_and_no_stack_is_copied():
    mesh = meshes.abstract(8)
    plan = Assignment({"block": {}})
    step = tiny_lm.released(optax.lion(1e-3), plan=plan, dtype=jnp.bfloat16, axis_name="data")
    params = tiny_lm.parameters(np.float32, layers=6, width=256, vocab=512)
    state = step.split(meshes.state(step, params, mesh, "states", meshes.shape), 2)
    batch = meshes.shape(jax.ShapeDtypeStruct((64, 65), jnp.int32), mesh, PartitionSpec("data"))
    call = jax.jit(step.data_parallel(mesh, "states"), donate_argnums=0)
    exported, donated = export_flat(call.trace(state, batch), "cuda", 90)
    with Compiler("h200:8", workers=1) as compiler:
        found = compiler.submit(exported, donated=donated).result()
    assert found.host_bytes == host_bytes(state) // 8 > 0
    assert fault(found.transfers) is None
