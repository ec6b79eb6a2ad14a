"""A piece of a traced program that can be run, compiled and timed by itself.

A piece that holds a `jax.shard_map` is priced on the mesh of that `shard_map`, collectives
included. The alternative was a loop over the bodies of all devices, on one device. Such a loop has
no collectives, and its kernels have one batch axis more.

The arguments of such a piece have no shardings, because inside a step the types of arrays on
automatic meshes name none. XLA propagates the `in_specs` of the `shard_map` to the arguments, as it
does in the step. XLA does not learn of batch axes that no `shard_map` of the piece names. So the
time is multiplied by the size of the named axes alone (`Job.shards`), and then divided like every
other price.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem._trace.jaxpr import equations, is_reference
from jaxmem._trace.stand_in import needs_values, on_any_values
from jaxmem._trace.vary import mapped_axes


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to be timed as one fused program.

    A function that holds a `jax.shard_map` over several devices can run on those devices only. Its
    time is then one device's; every other function runs whole on one device.

    function: takes arrays, and returns arrays in any container.
    avals: shapes and dtypes of its arguments, before a mesh divides them.
    axes: size by name of the mesh axes that divide the step's batch.
    """

    function: Callable
    avals: tuple
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of its arguments, without what else an aval holds."""
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.avals]

    @property
    def jaxpr(self) -> Any:
        """The trace of the program that is timed."""
        return self._timed[1]

    @functools.cached_property
    def _timed(self) -> tuple[Callable, Any]:
        """The program that is timed, and its trace: the function, or a stand-in for a function that
        may fail on made-up numbers.
        """
        traced = jax.make_jaxpr(self._called)(*self.specs)
        if not needs_values(traced.jaxpr):
            return self._called, traced
        safe = functools.partial(on_any_values, traced)
        return safe, jax.make_jaxpr(safe)(*self.specs)

    def _called(self, *arrays):
        """The function's results. A `jax.Ref` among its arguments is made from an array."""
        pairs = zip(arrays, self.avals)
        return self.function(*(jax.new_ref(a) if is_reference(t) else a for a, t in pairs))

    @functools.cached_property
    def _mapped(self) -> list:
        """Each `jax.shard_map` over several devices in the function."""
        mapped = (e for e in equations(self.jaxpr.jaxpr) if mapped_axes(e) is not None)
        return [eqn for eqn in mapped if eqn.params["mesh"].size > 1]

    @property
    def mesh(self) -> AbstractMesh | None:
        """The mesh of the `jax.shard_map` that the function holds; None if it holds none."""
        return self._mapped[0].params["mesh"].abstract_mesh if self._mapped else None

    @property
    def shards(self) -> int:
        """The number of devices that share the function's work where it runs: 1 without a mesh.

        XLA divides the arguments by the axes that a `jax.shard_map` names. It learns nothing of the
        batch's other axes.
        """
        named = set().union(*(mapped_axes(eqn) or () for eqn in self._mapped))
        return math.prod(size for axis, size in self.axes.items() if axis in named)

    def trace(self, devices: Sequence[Any] | None = None) -> jax.stages.Traced:
        """The traced function, to compile.

        devices: the mesh's devices, to run on; None for a mesh without devices, to export.

        With a mesh, a number on it is the first argument and the first result: JAX learns the
        devices from this argument, and leaves the division of the others to XLA.
        """
        if (mesh := self.mesh) is None:
            return jax.jit(self._timed[0]).trace(*self.specs)
        function, manual = self._timed[0], {*mesh.manual_axes}
        if manual:  # of a shard_map around the layer: each of its devices has the piece's arguments
            kinds = (AxisType.Auto if k == AxisType.Manual else k for k in mesh.axis_types)
            mesh = mesh.update(axis_types=tuple(kinds))
        if devices is not None:
            mesh = Mesh(
                np.array(devices[: mesh.size]).reshape(mesh.axis_sizes),
                mesh.axis_names,
                axis_types=mesh.axis_types,
            )
        if manual:
            every = PartitionSpec()
            function = jax.shard_map(
                function, mesh=mesh, in_specs=every, out_specs=every, axis_names=manual,
                check_vma=False,
            )  # fmt: skip
        sharding = NamedSharding(mesh, PartitionSpec())
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
        placed = lambda number, *arguments: (number, function(*arguments))
        return jax.jit(placed).trace(number, *self.specs)
