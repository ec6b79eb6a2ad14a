"""Where the states of a released step lie: how a state is split and joined."""

import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem._model.states import layout, room
from jaxmem._model.states.places import Places
from jaxmem._model.states.shared import delete_unless_in, sharing
from jaxmem._model.states.stacks import masters_of
from jaxmem._optim.released.model import Model
from jaxmem.errors import OptimizerError


def split(model: Model, optimizer, state, places: Places):
    """The state (params, optimizer state) with its arrays where `places` says."""
    layers = state[0][model.layers]
    share = Fraction(places.layers - places.persist, places.layers)
    states = masters_of(layers), optimizer.opened(model, *state)[0]
    device, wanted = room.device_of(state), int(room.nbytes(states) * share)
    room.check_pool(device, wanted)
    # On a CPU both memories are one, and what lies in one of them needs no more in the other.
    if room.has_host_memory(device):
        there = [a for a in jax.tree.leaves(states) if a.sharding.memory_kind == layout.HOST]
        room.check_free(wanted - room.nbytes(there))
    change = lambda layers, kept: layout.split(layers, places, kept)
    params, new = _over(model, optimizer, state, change, places.outer_moments)
    layout.drop_copies(layers)
    params[model.layers] = layout.with_copies(params[model.layers], places, model.dtype)
    return params, new


def joined(model: Model, optimizer, state):
    """The state with its layers' arrays as one stack each, and all others in device memory."""
    whole = _over(model, optimizer, state, layout.joined, layout.DEVICE)
    layout.drop_copies(state[0][model.layers])
    return whole


def places_of(count: int, persist: int, copies: int, buffers: int, outer_moments: str) -> Places:
    """The places of `count` layers. Raises OptimizerError unless the numbers are of layers that
    there are, and `outer_moments` is a memory.
    """
    if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
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
        number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not number or not 0 <= value <= left:
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


def _over(model: Model, optimizer, state, change: Callable, outer_moments: str):
    """The state with `change` made of the layers' arrays, which is also told which arrays it may
    not delete. All others lie in device memory, but for the optimizer's, which lie in the memory
    `outer_moments`.
    """
    params, old = state
    stacks, others, near, closed = optimizer.opened(model, params, old)
    mesh = mesh_of(params)
    kept = sharing(state)  # until all that is made of them has been
    new = {
        k: change(v, kept) if k == model.layers else _placed(v, layout.DEVICE, mesh)
        for k, v in params.items()
    }
    beside = jax.tree.map(lambda a: _on_mesh(a, mesh), [*stacks.values()])
    moved = [change(layers, kept) for layers in beside]
    placed = _placed(others, outer_moments, mesh), _placed(near, layout.DEVICE, mesh)
    made = new, closed(moved, *placed)
    delete_unless_in(made, kept)
    return made


def _placed(tree, kind: str, mesh):
    """Arrays in a memory, on the devices of `mesh`; numbers, such as counters, in device memory."""
    move = lambda a: layout.moved(_on_mesh(a, mesh), kind if a.ndim else layout.DEVICE)
    return jax.tree.map(move, tree)


def _on_mesh(a, mesh):
    """An array of one device whole on each device of `mesh`, unless that is None."""
    if mesh is None or not isinstance(a, jax.Array) or len(a.sharding.device_set) > 1:
        return a
    there = NamedSharding(mesh, PartitionSpec(), memory_kind=a.sharding.memory_kind)
    value = np.asarray(a)  # every process has its own: `device_put` would move one of them
    return jax.make_array_from_callback(a.shape, there, lambda index: value[index])


def mesh_of(params) -> Any:
    """The mesh of several devices that parameters lie on; None if they lie on one."""
    shardings = [a.sharding for a in jax.tree.leaves(params) if isinstance(a, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1]
    return meshes[0] if meshes else None
