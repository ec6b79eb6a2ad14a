"""States that are divided over devices and made a layer at a time are those that are made whole and
divided then, on meshes of both kinds of axes, in one process and in two.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmem
from jaxmem.errors import OptimizerError
from tests.programs.created import WAYS
from tests.shared import children, tiny_lm
from tests.shared.marks import slow

ALL = tuple(WAYS)
# The last bit of numbers below 1, which XLA:CPU may round otherwise where it makes a layer's parts.
BIT = 1e-7


def check(found: dict, ways, devices: int):
    assert found["devices"] == devices
    assert set(found["found"]) == set(ways)
    for way, of in found["found"].items():
        assert of["apart"] == []
        assert of["far"] <= BIT
        if WAYS[way][1] == "states":
            assert of["stepped"] <= 100 * BIT  # what a step makes of them, on the same mesh
            assert of["moved"] > 1e-4


@pytest.mark.quick("explicit-4-ways0")
@pytest.mark.parametrize(
    ("axes", "devices", "ways"),
    [
        ("explicit", 4, ("adama", "whole")),
        ("auto", 4, ("lion", "row")),
        slow("explicit", 8, ALL),
        slow("auto", 8, ALL),
    ],
)
def test_a_divided_state_is_made_as_it_is_divided(axes, devices, ways):
    program = "tests.programs.created", axes, ",".join(ways)
    found = children.printed(children.with_cpus(devices), *program)
    check(found, ways, devices)


@pytest.mark.quick("explicit")
@pytest.mark.parametrize(
    ("axes", "persist"), [(AxisType.Auto, 0), (AxisType.Explicit, 1)], ids=["auto", "explicit"]
)
def test_a_mesh_of_one_device_holds_all_parts(axes, persist):
    """What runs on several devices is tried on one: the values are those without a mesh."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axes,))
    params = tiny_lm.parameters(np.float32)
    layers, batch = params.pop("blocks"), tiny_lm.tokens(4).astype(jnp.int32)
    layer = lambda i: jax.tree.map(lambda a: a[i], layers)
    adama = lambda **axis: tiny_lm.released(jaxmem.adama(0.01, accumulation_steps=2, **axis))
    alone, step = adama(), adama(axis_name="data")
    made = step.create(params, layer, 3, persist, mesh=mesh, divided="states")
    got, _ = jax.jit(step.data_parallel(mesh, "states"))(made, batch)
    want, _ = jax.jit(alone)(alone.create(params, layer, 3, persist), batch)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    jax.tree.map(near, step.joined(got), alone.joined(want))


def test_what_cannot_be_divided_is_refused():
    step = tiny_lm.released(jaxmem.adama(0.01, axis_name="data"))
    outer, layer = {"embedding": jnp.ones((3, 2))}, lambda i: {"up": jnp.ones((2, 2)) * i}
    with pytest.raises(OptimizerError, match="create: `divided` is 'states', and `mesh` is None"):
        step.create(outer, layer, 3, divided="states")
    other = jax.make_mesh((1,), ("model",))
    with pytest.raises(OptimizerError, match="create: .* is 'data', and `mesh` has 'model'"):
        step.create(outer, layer, 3, mesh=other, divided="states")
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(OptimizerError, match="`divided` is 'all'; expected one of 'nothing'"):
        step.create(outer, layer, 3, mesh=mesh, divided="all")
