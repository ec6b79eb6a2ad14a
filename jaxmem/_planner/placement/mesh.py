"""A released step over the devices of a mesh. The shapes of its states and of its batch have
shardings over the mesh.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem._optim.released.bound import BoundStep
from jaxmem._optim.released.loss import LossStep
from jaxmem._optim.released.segments import SegmentedStep
from jaxmem._optim.released.step import ReleasedStep
from jaxmem._target.devices.target import Target
from jaxmem.errors import StepError


@dataclasses.dataclass(frozen=True)
class Divided:
    """How a released step is divided over a mesh.

    mesh: a mesh of devices, or an abstract mesh for a target without hardware.
    axis: the mesh axis of the optimizer.
    how: the states that are divided in addition to the batch, as `data_parallel` takes it.
    """

    mesh: Any
    axis: str
    how: str

    @property
    def devices(self) -> int:
        """The number of devices over which states are divided. States are replicated over other
        axes of the mesh.
        """
        return self.mesh.shape[self.axis]

    def step(self, released: ReleasedStep | LossStep):
        """The step over the mesh."""
        return released.data_parallel(self.mesh, self.how)

    def state(self, released: ReleasedStep | BoundStep, state):
        """The shapes of a state, divided over the mesh, all in device memory. The state may be in
        any form.
        """
        return jax.tree.map(self._placed, *self._specs(released, state))

    def moved(self, released: ReleasedStep | BoundStep, state):
        """A state's arrays, divided over the mesh. Each array remains in its memory. Arrays that
        move are donated, one after the other.
        """

        def move(a, spec):
            kind = a.sharding.memory_kind
            sharding = NamedSharding(self.mesh, spec, memory_kind=kind)
            if a.sharding.is_equivalent_to(sharding, a.ndim):
                return a
            return jax.block_until_ready(jax.device_put(a, sharding, donate=True))

        move_all = lambda spec, tree: jax.tree.map(lambda a: move(a, spec), tree)
        return jax.tree.map(move_all, *self._specs(released, state))

    def _specs(self, released: ReleasedStep | BoundStep, state) -> tuple[Any, Any]:
        """The partition specs of a state, and the state in the form with whole stacks."""
        state = released.joined(state)
        return released.specs(state[0], self.devices, self.how), state

    def others(self, args: tuple) -> tuple:
        """The shapes of the arguments after the state. The batch, which is the first of them, is
        divided. The others, such as a key, are replicated.
        """
        if not args:
            return ()
        batch, *rest = args
        for path, a in jax.tree.leaves_with_path(batch):
            if not a.shape or a.shape[0] % self.devices:
                raise StepError(
                    f"plan: `batch{jax.tree_util.keystr(path)}` has shape {tuple(a.shape)}, and is"
                    f" divided over {self.devices} devices; expected a leading axis that they and"
                    " the microbatches divide"
                )
        batch = self._placed(PartitionSpec(self.axis), batch)
        return batch, *(self._placed(PartitionSpec(), one) for one in rest)

    def _placed(self, spec: PartitionSpec, tree):
        sharding = NamedSharding(self.mesh, spec)
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(shape, tree)


def mesh_of(released: ReleasedStep | SegmentedStep, args: tuple, target: Target) -> tuple[Any, str]:
    """The mesh over which a step is divided, and the optimizer's axis. If the step's arguments are
    on a mesh of all devices with this axis, this mesh is returned; it may have other axes too.
    Otherwise the mesh has one axis of all devices of the target.

    Raises StepError if the optimizer has no axis.
    """
    axis = released.axis_name
    if axis is None:
        raise StepError(
            "plan: `decide` has 'sharding', and the optimizer's `axis_name` is None; expected the"
            " mesh axis to divide over, as in jaxmem.adama(..., axis_name='data')"
        )
    for a in jax.tree.leaves(args):
        mesh = getattr(getattr(a, "sharding", None), "mesh", None)
        # A mesh axis of one device would divide no array.
        if mesh is not None and mesh.size == target.devices and mesh.shape.get(axis, 1) > 1:
            return mesh, axis
    kinds = (AxisType.Auto,)
    if target.local:
        return jax.make_mesh((target.devices,), (axis,), axis_types=kinds), axis
    return AbstractMesh((target.devices,), (axis,), axis_types=kinds), axis
