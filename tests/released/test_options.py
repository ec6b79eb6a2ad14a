"""XLA's compile options of a released step that is divided over devices, without a plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem._target.compile.options import HIDING
from jaxmem.plans import Assignment, compiler_options
from tests.shared import tiny_lm

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]
DEVICES, LAYERS = 4, 4


@pytest.mark.parametrize(
    ("divided", "persist", "hides"),
    [("moments", LAYERS, False), ("states", LAYERS, False), ("layers", LAYERS, True)]
    + [("layers", 1, True)],
)
def test_loops_that_gather_layers_ask_for_the_scheduler_of_resident_states_too(
    divided, persist, hides
):
    mesh = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    tx = jaxmem.adama(1e-3, axis_name="data")
    step = tiny_lm.released(tx, plan=Assignment({"block": {}}))
    make = functools.partial(tiny_lm.parameters, np.float32, layers=LAYERS, width=16)
    shapes = jax.eval_shape(lambda: step.init(make()))
    put = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    specs = step.specs(shapes[0], DEVICES, divided)
    state = step.split(jax.tree.map(put, shapes, specs), persist)
    batch = put(jax.ShapeDtypeStruct((2 * DEVICES, 6), jnp.int32), PartitionSpec("data"))
    found = compiler_options(
        step.data_parallel(mesh, divided), state, batch, target=f"a100-80gb:{DEVICES}"
    )
    assert found == ({HIDING: True} if hides else {})
