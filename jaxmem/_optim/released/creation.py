"""Makes the first state of a model that need not fit into a device's memory: one layer at a time,
each in its place. Of arrays that are divided over devices, each device stores its part.

Every device makes a divided layer, and keeps its part. This is done inside `jax.shard_map`, where
XLA makes no more of the layer than the part needs, and nothing is sent between devices. On explicit
axes the layer is resharded instead, since `shard_map` refuses values that a function closes over
there, such as a key.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem._model.states import layout, room
from jaxmem._model.states.layout import Placement
from jaxmem._optim.released.model import Model
from jaxmem._optim.released.placement import check_memory, mesh_of
from jaxmem.errors import OptimizerError


def created(
    model: Model,
    optimizer,
    outer,
    layer: Callable,
    where: Placement,
    outer_moments: str,
    mesh: Mesh | None,
    divide: Callable | None,
):
    """The first state (params, optimizer state).

    outer: the parameters outside the layers.
    layer: `layer(i)`, the parameters of layer i, which is traced.
    where: how many layers there are, and where they lie.
    outer_moments: the memory of the optimizer's arrays outside the layers.
    mesh: the devices; None stands for those of `outer`.
    divide: makes the PartitionSpecs of a state, of its parameters' shapes; None leaves all arrays
      whole on each device.
    """
    check_memory(outer_moments)
    one = _one_layer(model, outer, layer)
    outside = jax.tree.map(_shape, outer)
    stacks_of = lambda count: jax.tree.map(lambda a: _shape(a, count), one)
    # A model with one layer stands for all: only the axis of layers would be a longer one.
    params = {**outside, model.layers: stacks_of(1)}
    state = jax.eval_shape(lambda params: optimizer.init(model, params), params)
    if divide is None:
        specs, state_specs = jax.tree.map(lambda _: PartitionSpec(), (params, state))
    else:
        specs, state_specs = divide({**outside, model.layers: stacks_of(where.count)})
    stack_specs, other_specs, near_specs, _ = optimizer.opened(model, params, state_specs)

    places = _NewState(where, mesh or mesh_of(outer) or _mesh_of_one(outer))
    of_a_layer = params[model.layers], *optimizer.opened(model, params, state)[0].values()
    _check_room(places, of_a_layer, (specs[model.layers], *stack_specs.values()))
    outer = places.put(outer, model.outer(specs), layout.DEVICE)
    made = optimizer.created(model, outer, layer, where.count, places.stacked, state_specs)
    params = {**outer, model.layers: places.stacked(one, specs[model.layers], layer)}
    stacks, others, near, closed = optimizer.opened(model, params, made)
    params[model.layers] = layout.with_copies(params[model.layers], where, model.dtype)
    others = places.put(others, other_specs, outer_moments)
    return params, closed([*stacks.values()], others, places.put(near, near_specs, layout.DEVICE))


@dataclasses.dataclass(frozen=True)
class _NewState:
    """Where a state is made.

    where: how many layers there are, and where they lie.
    mesh: the devices.
    """

    where: Placement
    mesh: Mesh

    def at(self, spec: PartitionSpec, kind: str) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=kind)

    def stacked(self, one, specs, make: Callable | None):
        """Stacks of layers, each made by `make(i)`, or zeros.

        one: the shapes of a layer.
        specs: the PartitionSpecs of the stacks.
        """
        parts = []
        for start, stop, kind in self.where.bounds:
            shape = lambda a, spec, count=stop - start, kind=kind: jax.ShapeDtypeStruct(
                (count, *a.shape), a.dtype, sharding=self.at(spec, kind)
            )
            shapes = jax.tree.map(shape, one, specs)
            if make is None:
                parts.append(jax.tree.map(layout.empty, shapes))
            else:
                parts.append(layout.filled(shapes, lambda i, first=start: make(first + i)))
        return self.where.together(parts)

    def put(self, tree, specs, kind: str):
        """Arrays in a memory; numbers, such as counters, in device memory."""

        def one(a, spec):
            to = self.at(spec, kind if np.ndim(a) else layout.DEVICE)
            if self.mesh.size == 1 or (isinstance(a, jax.Array) and len(a.devices()) > 1):
                return jax.device_put(jnp.asarray(a), to)
            value = np.asarray(a)  # every process has its own: `device_put` would move one of them
            return jax.make_array_from_callback(value.shape, to, lambda index: value[index])

        return jax.tree.map(one, tree, specs)


def _one_layer(model: Model, outer, layer):
    """The shapes of what `layer` makes. Raises OptimizerError for what no model is made of."""
    if not isinstance(outer, dict) or model.layers in outer or not callable(layer):
        what = f"a dict without {model.layers!r}, and a function"
        got = [*outer] if isinstance(outer, dict) else type(outer).__name__
        raise OptimizerError(
            f"released_step: `outer` is {got} and `layer` {type(layer).__name__}; expected {what}"
        )
    one = jax.eval_shape(layer, jax.ShapeDtypeStruct((), jnp.int32))
    if not jax.tree.leaves(one):
        raise OptimizerError(
            "released_step: `layer` returned no array; expected the parameters of layer i, a tree"
            " of arrays"
        )
    model.check({**outer, model.layers: one})
    return one


def _shape(a, *layers: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*layers, *jnp.shape(a)), jnp.result_type(a))


def _mesh_of_one(outer) -> Mesh:
    """The mesh of the one device that `outer` lies on, or else the default one."""
    arrays = [a for a in jax.tree.leaves(outer) if isinstance(a, jax.Array)]
    first: Any = layout.moved(arrays[0] if arrays else jnp.zeros(()), layout.DEVICE)
    return first.sharding.mesh


def _check_room(places: _NewState, stacks, specs) -> None:
    """Raises TargetError unless this process's machine has room for the layers that are to lie in
    its memory.

    stacks: the shapes of all stacks, of one layer.
    """

    def nbytes(a, spec) -> int:
        part = NamedSharding(places.mesh, spec).shard_shape(a.shape)
        return math.prod(part) * a.dtype.itemsize

    a_layer = sum(jax.tree.leaves(jax.tree.map(nbytes, stacks, specs)))
    a_layer *= len(places.mesh.local_devices)
    device, where = places.mesh.devices.flat[0], places.where
    streamed = where.copies + where.streamed
    room.check_pool(device, a_layer * streamed)
    room.check_free(a_layer * (streamed if room.has_host_memory(device) else where.count))
