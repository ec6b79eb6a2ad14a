"""Meshes of all devices, and states and arrays that are divided over them, for tests and programs
with several devices.
"""

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

WHOLE = P()


def line(kind: AxisType = AxisType.Auto, name: str = "data") -> jax.sharding.Mesh:
    """Returns the mesh of one axis over all devices."""
    return jax.make_mesh((jax.device_count(),), (name,), axis_types=(kind,))


def abstract(devices: int) -> AbstractMesh:
    """Returns the mesh of one axis over absent devices."""
    return AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))


def shape(a, mesh, spec=WHOLE) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that is divided over a mesh."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))


def placed(a, mesh, spec=WHOLE) -> jax.Array:
    """Returns an array that every process has, divided over the devices of all processes."""
    a, place = np.asarray(a), NamedSharding(mesh, spec)
    return jax.make_array_from_callback(a.shape, place, lambda index: a[index])


def state(step, params, mesh, divided: str, how=placed):
    """Returns the first state of a released step, divided over the mesh. `how`: `placed`, or
    `shape` for the shapes of a state.
    """
    state = step.init(params) if how is placed else jax.eval_shape(step.init, params)
    specs = step.specs(state[0], mesh.shape["data"], divided)
    return jax.tree.map(lambda a, spec: how(a, mesh, spec), state, specs)


def join(number: int, count: int, port: int, **limits) -> None:
    """Makes this process one of `count` processes, whose CPUs communicate."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, number, **limits)
