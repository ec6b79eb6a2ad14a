"""Makes the first state of a model that need not fit into a device's memory: one layer at a time,
each in its place. Of arrays that are divided over devices, each device stores its part.

Every device makes a divided layer, and keeps its part. This is done inside `jax.shard_map`, where
XLA makes no more of the layer than the part needs, and nothing is sent between devices. On explicit
axes the layer is resharded instead, since `shard_map` refuses values that a function closes over
there, such as a key.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem._model.states import layout, room
from jaxmem._model.states.places import Places
from jaxmem._optim.released.model import Model
from jaxmem._optim.released.placement import mesh_of
from jaxmem._trace.arguments import shard_bytes
from jaxmem.errors import OptimizerError


def created(
    model: Model,
    optimizer,
    outer,
    layer: Callable,
    places: Places,
    mesh: Mesh | None,
    divide: Callable | None,
):
    """The first state (params, optimizer state).

    outer: the parameters outside the layers.
    layer: `layer(i)`, the parameters of layer i, which is traced.
    places: the memories of the layers' states, and of the optimizer's arrays outside the layers.
    mesh: the devices; None stands for those of `outer`.
    divide: makes the PartitionSpecs of a state, of its parameters' shapes; None leaves all arrays
      whole on each device.
    """
    one = _one_layer(model, outer, layer)
    outside = jax.tree.map(_shape, outer)
    stacks_of = lambda count: jax.tree.map(lambda a: _shape(a, count), one)
    # A model with one layer stands for all: only the axis of layers would be a longer one.
    params = {**outside, model.layers: stacks_of(1)}
    state = jax.eval_shape(lambda params: optimizer.init(model, params), params)
    if divide is None:
        specs, state_specs = jax.tree.map(lambda _: PartitionSpec(), (params, state))
    else:
        specs, state_specs = divide({**outside, model.layers: stacks_of(places.layers)})
    stack_specs, other_specs, near_specs, _ = optimizer.opened(model, params, state_specs)

    new = _NewState(places, mesh or mesh_of(outer) or _mesh_of_one(outer))
    of_a_layer = params[model.layers], *optimizer.opened(model, params, state)[0].values()
    _check_room(new, of_a_layer, (specs[model.layers], *stack_specs.values()))
    outer = new.put(outer, model.outer(specs), layout.DEVICE)
    made = optimizer.created(model, outer, layer, places.layers, new.stacked, state_specs)
    params = {**outer, model.layers: new.stacked(one, specs[model.layers], layer)}
    stacks, others, near, closed = optimizer.opened(model, params, made)
    params[model.layers] = layout.with_copies(params[model.layers], places, model.dtype)
    others = new.put(others, other_specs, places.outer_moments)
    return params, closed([*stacks.values()], others, new.put(near, near_specs, layout.DEVICE))


@dataclasses.dataclass(frozen=True)
class _NewState:
    """Makes the arrays of a state in their memories.

    places: the memories.
    mesh: the devices.
    """

    places: Places
    mesh: Mesh

    def at(self, spec: PartitionSpec, kind: str) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=kind)

    def stacked(self, one, specs, make: Callable | None):
        """Stacks of layers, each made by `make(i)`, or zeros.

        one: the shapes of a layer.
        specs: the PartitionSpecs of the stacks.
        """
        parts = []
        for start, stop, kind in layout.bounds(self.places):
            shape = lambda a, spec, count=stop - start, kind=kind: jax.ShapeDtypeStruct(
                (count, *a.shape), a.dtype, sharding=self.at(spec, kind)
            )
            shapes = jax.tree.map(shape, one, specs)
            if make is None:
                parts.append(jax.tree.map(layout.empty, shapes))
            else:
                parts.append(layout.filled(shapes, lambda i, first=start: make(first + i)))
        return layout.together(self.places, parts)

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


def _check_room(new: _NewState, stacks, specs) -> None:
    """Raises TargetError unless this process's machine has room for the layers that are to lie in
    its memory.

    stacks: the shapes of all stacks, of one layer.
    """

    nbytes = lambda a, spec: shard_bytes(a, NamedSharding(new.mesh, spec))
    a_layer = sum(jax.tree.leaves(jax.tree.map(nbytes, stacks, specs)))
    a_layer *= len(new.mesh.local_devices)
    device, places = new.mesh.devices.flat[0], new.places
    hosted = places.layers - places.persist
    room.check_pool(device, a_layer * hosted)
    room.check_free(a_layer * (hosted if room.has_host_memory(device) else places.layers))
