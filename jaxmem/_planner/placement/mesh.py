"""A released step over the devices of a mesh: its states and its batch as shapes that say how they
are divided.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem._optim.released.step import ReleasedStep
from jaxmem._target.devices.target import Target
from jaxmem.errors import StepError


@dataclasses.dataclass(frozen=True)
class Divided:
    """How a released step is divided over a mesh.

    mesh: the devices, or a mesh without them for a target that is not there.
    axis: that of the optimizer.
    how: what is divided beside the batch, as `data_parallel` takes it.
    """

    mesh: Any
    axis: str
    how: str

    @property
    def devices(self) -> int:
        """Over how many devices states are divided; other axes of the mesh hold copies."""
        return self.mesh.shape[self.axis]

    def step(self, released: ReleasedStep):
        """The step over the mesh."""
        return released.data_parallel(self.mesh, self.how)

    def state(self, released: ReleasedStep, state):
        """The shapes of a state, all in device memory, in any form."""
        return jax.tree.map(self._placed, *self._specs(released, state), is_leaf=_is_spec)

    def moved(self, released: ReleasedStep, state):
        """A state's arrays, divided so, each in the memory that it lies in; those that move are
        donated, one after the other.
        """

        def one(a, spec):
            kind = a.sharding.memory_kind
            sharding = NamedSharding(self.mesh, spec, memory_kind=kind)
            if a.sharding.is_equivalent_to(sharding, a.ndim):
                return a
            return jax.block_until_ready(jax.device_put(a, sharding, donate=True))

        to = lambda spec, tree: jax.tree.map(lambda a: one(a, spec), tree)
        return jax.tree.map(to, *self._specs(released, state), is_leaf=_is_spec)

    def _specs(self, released: ReleasedStep, state) -> tuple[Any, Any]:
        """How a state is laid out, and the state in the form with whole stacks."""
        state = released.joined(state)
        return released.specs(state[0], self.devices, self.how), state

    def others(self, args: tuple) -> tuple:
        """The shapes of the arguments after the state: the batch is divided, a key is not."""
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


def _is_spec(a) -> bool:
    return isinstance(a, PartitionSpec)


def mesh_of(released: ReleasedStep, args: tuple, target: Target) -> tuple[Any, str]:
    """The mesh that a step is to be divided over, and its axis: the one that its arguments lie on,
    which may have other axes too, or one of all devices of the target.

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
        # An axis of one device would divide nothing.
        if mesh is not None and mesh.size == target.devices and mesh.shape.get(axis, 1) > 1:
            return mesh, axis
    kinds = (AxisType.Auto,)
    if target.local:
        return jax.make_mesh((target.devices,), (axis,), axis_types=kinds), axis
    return AbstractMesh((target.devices,), (axis,), axis_types=kinds), axis
