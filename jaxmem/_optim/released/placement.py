"""Where the states of a released step are stored: how a state is made, split and joined.

The first state of a model that need not fit into a device's memory is made one layer at a time, and
each layer is made where it is stored. Every device makes a layer that devices divide, and keeps its
part. This is done inside `jax.shard_map`, where XLA makes no more of the layer than the part needs,
and nothing is sent between devices. On explicit axes the layer is resharded instead, since
`shard_map` refuses values that a function closes over there, such as a key.
"""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem._core.reader import is_whole
from jaxmem._model.states import layout, room
from jaxmem._model.states.places import Places
from jaxmem._optim.released.model import Model
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
    """Makes the first state (params, optimizer state).

    outer: the parameters outside the layers.
    layer: `layer(i)` returns the parameters of layer i; i is traced.
    places: the memories of the layers' states, and of the optimizer's arrays outside the layers.
    mesh: the devices; None means the devices that store `outer`.
    divide: `divide(params)` returns the PartitionSpecs of a state from the shapes of its
      parameters. None stores all arrays whole on each device.
    """
    one = _one_layer(model, outer, layer)
    outside = jax.tree.map(_shape, outer)
    stacks_of = lambda count: jax.tree.map(lambda a: _shape(a, count), one)
    # The state of a model with one layer has the same tree and dtypes; only the axis of layers is
    # shorter.
    params = {**outside, model.layers: stacks_of(1)}
    state = jax.eval_shape(lambda params: optimizer.init(model, params), params)
    if divide is None:
        specs, state_specs = jax.tree.map(lambda _: PartitionSpec(), (params, state))
    else:
        specs, state_specs = divide({**outside, model.layers: stacks_of(places.layers)})
    stack_specs, other_specs, near_specs, _ = optimizer.opened(model, params, state_specs)

    devices: Mesh = mesh or _mesh_of(outer) or mesh_of_one(outer)
    stacked, put_on = functools.partial(_stacked, places, devices), functools.partial(put, devices)
    of_a_layer = params[model.layers], *optimizer.opened(model, params, state)[0].values()
    _check_room(places, devices, of_a_layer, (specs[model.layers], *stack_specs.values()))
    outer = put_on(outer, model.outer(specs), layout.DEVICE)
    made = optimizer.created(model, outer, layer, places.layers, stacked, state_specs)
    params = {**outer, model.layers: stacked(one, specs[model.layers], layer)}
    stacks, others, near, closed = optimizer.opened(model, params, made)
    params[model.layers] = layout.with_copies(params[model.layers], places, model.dtype)
    others = put_on(others, other_specs, places.outer_moments)
    return params, closed([*stacks.values()], others, put_on(near, near_specs, layout.DEVICE))


def from_host(stacked) -> Callable:
    """Returns the function of a layer's index that fetches the layer from stacks in the host's
    memory, as `created` takes it. Only this layer is copied to the device.
    """
    shapes = layout.one_layer(stacked)
    fetch = lambda i: jax.tree.map(lambda a: np.asarray(a[int(i)]), stacked)
    return lambda i: jax.pure_callback(fetch, shapes, i)


def frozen_stacks(stacked, specs, places: Places, mesh: Mesh):
    """Makes the stacks of the layers' frozen parameters where `places` stores them.

    stacked: the stacks in the host's memory.
    specs: their PartitionSpecs.
    mesh: the devices.
    """
    one = layout.one_layer(jax.tree.map(_shape, stacked))
    _check_room(places, mesh, jax.tree.map(lambda a: _shape(a, 1), one), specs)
    return _stacked(places, mesh, one, specs, from_host(stacked), copied=layout.DEVICE)


def split(model: Model, optimizer, state, places: Places):
    """Returns the state (params, optimizer state) with its arrays in the memories of `places`."""
    layers = state[0][model.layers]
    check_host((layout.masters_of(layers), optimizer.opened(model, *state)[0]), places)
    change = lambda layers, kept: layout.split(layers, places, kept)
    params, new = _over(model, optimizer, state, change, places.outer_moments)
    layout.drop_copies(layers)
    params[model.layers] = layout.with_copies(params[model.layers], places, model.dtype)
    return params, new


def check_host(states, places: Places) -> None:
    """Raises TargetError if the host has too little memory for the layers that `places` stores
    there.

    states: the arrays of all layers, or their shapes.
    """
    share = Fraction(places.layers - places.persist, places.layers)
    device, wanted = room.device_of(states), int(room.nbytes(states) * share)
    room.check_pool(device, wanted)
    # A CPU has one memory: a move between its two memory kinds needs no more bytes.
    if room.has_host_memory(device):
        there = [a for a in jax.tree.leaves(states) if a.sharding.memory_kind == layout.HOST]
        room.check_free(wanted - room.nbytes(there))


def joined(model: Model, optimizer, state):
    """Returns the state with the layers' arrays as one stack each, and all other arrays in device
    memory.
    """
    whole = _over(model, optimizer, state, layout.joined, layout.DEVICE)
    layout.drop_copies(state[0][model.layers])
    return whole


def places_of(count: int, persist: int, copies: int, buffers: int, outer_moments: str) -> Places:
    """Returns the places of `count` layers. Raises OptimizerError for a number that is negative,
    not an integer, or larger than the number of layers that remain, and for an unknown memory.
    """
    if not is_whole(count, 1):
        raise OptimizerError(
            f"released_step: `count` is {count!r}; expected how many layers there are, at least 1"
        )
    says = {
        "persist": (persist, "states stay in device memory"),
        "copies": (copies, "parameters have a copy in device memory"),
        "buffers": (buffers, "parameters stay there for the backward"),
    }
    left, before = count, []
    for name, (value, what) in says.items():
        if not is_whole(value) or value > left:
            after = f", after {' and '.join(before)}" if before else ""
            raise OptimizerError(
                f"released_step: `{name}` is {value!r}; expected how many layers' {what},"
                f" 0 to {left}{after}"
            )
        left -= value
        before.append(f"{name}={value}")
    if outer_moments not in (layout.DEVICE, layout.HOST):
        raise OptimizerError(
            f"released_step: `outer_moments` is {outer_moments!r}; expected the memory of the"
            f" moments outside the layers, {layout.DEVICE!r} or {layout.HOST!r}"
        )
    return Places(int(count), int(persist), int(copies), int(buffers), outer_moments)


def _stacked(
    places: Places, mesh: Mesh, one, specs, make: Callable | None, copied: str = layout.HOST
):
    """Makes stacks of layers where `places` stores them: layer i is `make(i)`, or zeros if `make`
    is None.

    one: the shapes of a layer.
    specs: the PartitionSpecs of the stacks.
    copied: the memory of layers with copies.
    """
    parts = []
    for start, stop, kind in layout.bounds(places, copied):
        shape = lambda a, spec, count=stop - start, kind=kind: jax.ShapeDtypeStruct(
            (count, *a.shape), a.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind)
        )
        shapes = jax.tree.map(shape, one, specs)
        if make is None:
            parts.append(jax.tree.map(layout.empty, shapes))
        else:
            parts.append(layout.filled(shapes, lambda i, first=start: make(first + i)))
    return layout.together(places, parts)


def put(mesh: Mesh, tree, specs, kind: str):
    """Moves arrays to the memory `kind`, and scalars, such as counters, to device memory."""

    def one(a, spec):
        to = NamedSharding(mesh, spec, memory_kind=kind if np.ndim(a) else layout.DEVICE)
        if mesh.size == 1 or (isinstance(a, jax.Array) and len(a.devices()) > 1):
            return jax.device_put(jnp.asarray(a), to)
        return _from_each_process(a, to)

    return jax.tree.map(one, tree, specs)


def _one_layer(model: Model, outer, layer):
    """Returns the shapes of the parameters that `layer` makes. Raises OptimizerError for arguments
    of another form.
    """
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
    """Returns the shape and dtype of an array, below leading axes of these `layers`."""
    return jax.ShapeDtypeStruct((*layers, *jnp.shape(a)), jnp.result_type(a))


def mesh_of_one(outer) -> Mesh:
    """Returns the mesh of the device that stores `outer`, or of the default device."""
    arrays = [a for a in jax.tree.leaves(outer) if isinstance(a, jax.Array)]
    first: Any = layout.moved(arrays[0] if arrays else jnp.zeros(()), layout.DEVICE)
    return first.sharding.mesh


def _check_room(places: Places, mesh: Mesh, stacks, specs) -> None:
    """Raises TargetError unless this process's machine has enough free memory for the layers that
    it will store.

    stacks: the shapes of all stacks, of one layer.
    """
    nbytes = lambda a, spec: shard_bytes(a, NamedSharding(mesh, spec))
    a_layer = sum(jax.tree.leaves(jax.tree.map(nbytes, stacks, specs)))
    a_layer *= len(mesh.local_devices)
    device = mesh.devices.flat[0]
    hosted = places.layers - places.persist
    room.check_pool(device, a_layer * hosted)
    room.check_free(a_layer * (hosted if room.has_host_memory(device) else places.layers))


def _over(model: Model, optimizer, state, change: Callable, outer_moments: str):
    """Returns the state with `change(layers, kept)` in place of the layers' arrays; `kept` has the
    arrays that `change` may not delete. The optimizer's arrays outside the layers are moved to the
    memory `outer_moments`, and all other arrays to device memory.
    """
    params, old = state
    stacks, others, near, closed = optimizer.opened(model, params, old)
    mesh = _mesh_of(params)
    kept = layout.sharing(state)  # deleted after all new arrays are made
    new = {
        k: change(v, kept) if k == model.layers else _placed(v, layout.DEVICE, mesh)
        for k, v in params.items()
    }
    beside = jax.tree.map(lambda a: _on_mesh(a, mesh), [*stacks.values()])
    moved = [change(layers, kept) for layers in beside]
    placed = _placed(others, outer_moments, mesh), _placed(near, layout.DEVICE, mesh)
    made = new, closed(moved, *placed)
    layout.delete_unless_in(made, kept)
    return made


def _placed(tree, kind: str, mesh):
    """Moves arrays to the memory `kind` on the devices of `mesh`, and scalars, such as counters, to
    device memory.
    """
    move = lambda a: layout.moved(_on_mesh(a, mesh), kind if a.ndim else layout.DEVICE)
    return jax.tree.map(move, tree)


def _on_mesh(a, mesh):
    """Copies an array of one device to each device of `mesh`. None leaves the array as it is."""
    if mesh is None or not isinstance(a, jax.Array) or len(a.sharding.device_set) > 1:
        return a
    there = NamedSharding(mesh, PartitionSpec(), memory_kind=a.sharding.memory_kind)
    return _from_each_process(a, there)


def _from_each_process(a, sharding: NamedSharding) -> jax.Array:
    """Returns an array whose parts come from each process's own copy of `a`: `jax.device_put` would
    send one process's copy to the others.
    """
    value = np.asarray(a)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _mesh_of(params) -> Any:
    """Returns the mesh of several devices that store the parameters; None for one device."""
    shardings = [a.sharding for a in jax.tree.leaves(params) if isinstance(a, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1]
    return meshes[0] if meshes else None
