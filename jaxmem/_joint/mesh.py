"""A released step over the devices of a mesh: its states and its batch as shapes that say how they
are divided.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem._device.target import Target
from jaxmem._released.step import ReleasedStep
from jaxmem.errors import StepError


@dataclasses.dataclass(frozen=True)
class Divided:
    """How a released step is divided over a mesh.

    mesh: the devices, or a mesh without them for a target that is not there.
    axis: that of the optimizer.
    how: "nothing", "moments" or "states", as `data_parallel` takes it.
    """

    mesh: Any
    axis: str
    how: str

    def step(self, released: ReleasedStep):
        """The step over the mesh."""
        return released.data_parallel(self.mesh, self.how)

    def state(self, released: ReleasedStep, state):
        """The shapes of a state, all in device memory, in any form."""
        return jax.tree.map(self._placed, *self._specs(released, state), is_leaf=_is_spec)

    def moved(self, released: ReleasedStep, state):
        """A state's arrays, divided so."""
        to = lambda spec, tree: jax.device_put(tree, NamedSharding(self.mesh, spec))
        return jax.tree.map(to, *self._specs(released, state), is_leaf=_is_spec)

    def _specs(self, released: ReleasedStep, state) -> tuple[Any, Any]:
        """How a state is laid out, and the state in the form with whole stacks."""
        state = released.joined(state)
        return released.specs(state[0], self.mesh.shape[self.axis], self.how), state

    def others(self, args: tuple) -> tuple:
        """The shapes of the arguments after the state: the batch is divided, a key is not."""
        if not args:
            return ()
        batch, *rest = args
        batch = self._placed(PartitionSpec(self.axis), batch)
        return batch, *(self._placed(PartitionSpec(), one) for one in rest)

    def _placed(self, spec: PartitionSpec, tree):
        sharding = NamedSharding(self.mesh, spec)
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(shape, tree)


def _is_spec(a) -> bool:
    return isinstance(a, PartitionSpec)


def mesh_of(released: ReleasedStep, args: tuple, target: Target) -> tuple[Any, str]:
    """The mesh that a step is to be divided over, and its axis: the one that its arguments lie on,
    or one of all devices of the target.

    Raises StepError where the optimizer has no axis.
    """
    axis = released.optimizer.axis_name
    if axis is None:
        raise StepError(
            "plan: `decide` has 'sharding', and the optimizer's `axis_name` is None; expected the"
            " mesh axis to divide over, as in jaxmem.adama(..., axis_name='data')"
        )
    for a in jax.tree.leaves(args):
        mesh = getattr(getattr(a, "sharding", None), "mesh", None)
        if mesh is not None and axis in mesh.shape and mesh.size == target.devices:
            return mesh, axis
    kinds = (AxisType.Auto,)
    if target.local:
        return jax.make_mesh((target.devices,), (axis,), axis_types=kinds), axis
    return AbstractMesh((target.devices,), (axis,), axis_types=kinds), axis
