"""ZeRO-3 with states in host memory: each device fetches its part of a layer, gathers the layer,
and updates its part.
"""

import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._hlo.transfers import fault
from jaxmem._jax.export import export_flat
from jaxmem._xla.deviceless import Compiler
from tests.shared import children, tiny_lm
from tests.shared.marks import slow

pytestmark = pytest.mark.jax_defaults


def test_eight_devices_train_as_with_resident_states():
    run = subprocess.run(
        [sys.executable, "-m", "tests.programs.streamed_zero3"],
        env=children.with_cpus(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    got = json.loads(run.stdout.splitlines()[-1])
    assert got["devices"] == 8
    there = "pinned_host P(None, 'data')"
    for persist, found in got["found"].items():
        # Relative to numbers of about 1.
        assert found["far"] <= 1e-6
        here = [] if persist == "0" else ["device P(None, 'data')"]
        assert [p.replace("PartitionSpec", "P") for p in found["places"]] == [*here, there]
    for error in got["errors"].values():
        assert "expected data_parallel(mesh, 'states')" in error


@pytest.mark.parametrize(("devices", "persist"), [(8, 2), slow(64, 0)])
def test_each_gpu_holds_its_part_in_its_host_and_no_stack_is_copied(devices, persist):
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    tx = jaxmem.adama(1e-3, axis_name="data")
    step = tiny_lm.released(tx, plan=Assignment({"block": {}}), dtype=jnp.bfloat16)
    make = functools.partial(tiny_lm.parameters, np.float32, layers=6, width=256, vocab=512)
    shapes = jax.eval_shape(lambda: step.init(make()))
    put = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    state = step.split(jax.tree.map(put, shapes, step.specs(shapes[0], devices, "states")), persist)
    batch = put(jax.ShapeDtypeStruct((8 * devices, 65), jnp.int32), PartitionSpec("data"))
    call = jax.jit(step.data_parallel(mesh, "states"), donate_argnums=0)
    exported, donated = export_flat(call.trace(state, batch), "cuda", 90)
    with Compiler(f"h200:{devices}", workers=1) as compiler:
        found = compiler.submit(exported, donated=donated).result()
    host = [a for a in jax.tree.leaves(state) if a.sharding.memory_kind == "pinned_host"]
    assert found.host_bytes == sum(math.prod(a.shape) * 4 for a in host) // devices > 0
    assert fault(found.transfers) is None
