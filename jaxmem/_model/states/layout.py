"""A model's layers as stacked arrays: one stack, or a stack in each memory, since all arrays of a
stack are stored in one memory. This file splits stacks, joins them, and makes new ones in place.

If the lengths of the stacks change, the new stacks are filled one layer at a time, one array of a
state after the other. The array that is moved is then stored twice, and the device stores one more
layer of it.

Arrays of a state may share memory, so that none of them may be deleted alone: one array under two
names, or several arrays that `jax.device_put` made of one. Such arrays are recognised by addresses.
The alternative is the ids of the objects. `jax.device_put` to the memory where an array is stored
already makes another object of the same memory, and deleting one of the two objects deletes both.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem._model.states.places import DEVICE, HOST, Places
from jaxmem._model.states.store import counted, fetch, put

Bound = tuple[int, int, str]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["buffers"])
@dataclasses.dataclass(frozen=True)
class Stacks:
    """The arrays of a model's layers, divided after some of them.

    parts: one tree for each stack, in the order of the layers. All trees have one structure, and a
      stack with copies is a `Copied` of two trees. Each array has a leading axis of layers.
    buffers: number of layers, the last ones, whose fetched parameters stay on the device from the
      forward to the backward (ProTrain's n_buffer).
    """

    parts: tuple[Any, ...]
    buffers: int = 0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["copy", "master"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Copied:
    """Stacked parameters that are stored twice.

    copy: the parameters in device memory, in the dtype that the layers compute in.
    master: the parameters in host memory, in their own dtype. The optimizer updates the master.
    """

    copy: Any
    master: Any


def is_stacks(a) -> bool:
    """Whether the layers' arrays are divided among several stacks."""
    return isinstance(a, Stacks)


def is_split(a) -> bool:
    """Whether the layers' arrays are divided among several stacks, or have copies."""
    return isinstance(a, Stacks | Copied)


def parts_of(layers) -> tuple[Any, ...]:
    """Returns the stacks of `layers`. A tree that is not a `Stacks` is one stack."""
    return layers.parts if isinstance(layers, Stacks) else (layers,)


def read_of(layers) -> tuple[Any, ...]:
    """Returns the stacks that the layers compute with: copies where there are copies."""
    return tuple(p.copy if isinstance(p, Copied) else p for p in parts_of(layers))


def masters_of(layers) -> tuple[Any, ...]:
    """Returns the stacks that the optimizer updates: masters where there are copies."""
    return tuple(p.master if isinstance(p, Copied) else p for p in parts_of(layers))


def buffers_of(layers) -> int:
    """Returns the number of buffered layers, as `Stacks.buffers`."""
    return layers.buffers if isinstance(layers, Stacks) else 0


def like(layers, parts):
    """Returns a `Stacks` of `parts` if `layers` is one; else the only part."""
    return Stacks(tuple(parts), layers.buffers) if isinstance(layers, Stacks) else next(iter(parts))


def joined_shapes(layers):
    """Returns the shapes of one stack of all layers, without memories."""

    def one(*arrays):
        count = sum(a.shape[0] for a in arrays)
        return jax.ShapeDtypeStruct((count, *arrays[0].shape[1:]), arrays[0].dtype)

    return jax.tree.map(one, *masters_of(layers))


def one_layer(stacked):
    """Returns the shapes of one layer of a stack."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)


def length(stacked) -> int:
    """Returns the number of layers of one stack."""
    return jax.tree.leaves(stacked)[0].shape[0]


def bounds(places: Places, copied: str = HOST) -> list[Bound]:
    """Returns, for each stack, its first layer, the layer after its last layer, and the memory of
    its states. `copied` is the memory of layers with copies.
    """
    counts = (places.persist, places.copies, places.streamed)
    ends = itertools.pairwise(itertools.accumulate(counts, initial=0))
    found = [(*pair, kind) for pair, kind in zip(ends, (DEVICE, copied, HOST))]
    return [bound for bound in found if bound[0] < bound[1]]


def together(places: Places, parts: Sequence):
    """Returns the stacks of `bounds` as a `Stacks`; a single stack without buffers is returned
    alone.
    """
    whole = len(parts) == 1 and not places.buffers
    return parts[0] if whole else Stacks(tuple(parts), places.buffers)


def split(layers, places: Places, kept: Collection[int] = (), copied: str = HOST):
    """Returns the layers' arrays in the stacks and memories of `places`. The old array is deleted
    if an array moves.

    layers: a tree of stacked arrays, or of their shapes; or a `Stacks`.
    kept: the ids of arrays that are not deleted, since other arrays share their memory.
    copied: the memory of layers with copies. The frozen arrays of such layers are in device memory
      alone.
    """
    stacks = masters_of(layers)
    leaves = zip(*map(jax.tree.leaves, stacks))
    divided = zip(*(_divided(arrays, bounds(places, copied), kept) for arrays in leaves))
    parts = [jax.tree.unflatten(jax.tree.structure(stacks[0]), part) for part in divided]
    return together(places, parts)


def with_copies(layers, places: Places, dtype):
    """Adds the copies of `places` to parameters that `split` returned. The copies have the dtype
    `dtype`; None means the dtypes of the parameters.
    """
    if not places.copies:
        return layers
    pairs = zip(masters_of(layers), bounds(places))
    first = places.persist  # the first layer with a copy
    parts = [copied(part, dtype) if start == first else part for part, (start, *_) in pairs]
    return together(places, parts)


def copied(master, dtype) -> Copied:
    """Returns stacked parameters with their copy in device memory. The copy is made one layer at a
    time.
    """

    def one(a):
        to = dtype if dtype is not None and jnp.issubdtype(a.dtype, jnp.floating) else a.dtype
        shape = jax.ShapeDtypeStruct(a.shape, to, sharding=_sharding(a, DEVICE))
        if isinstance(a, jax.ShapeDtypeStruct):
            return shape
        return _copied(empty(shape), [a], [0, a.shape[0]], 0, a.shape[0])

    return Copied(jax.tree.map(one, master), master)


def joined(layers, kept: Collection[int] = ()):
    """Returns `layers` as one stack: in host memory if any layer is stored there, else in device
    memory. The old array is deleted if an array moves, unless its id is in `kept`.
    """
    count = sum(map(length, masters_of(layers)))
    streams = any(map(_on_host, jax.tree.leaves(layers)))
    return split(layers, Places(count, 0 if streams else count), kept)


def drop_copies(layers) -> None:
    """Deletes the copies of parameters. A state in another form shares no memory with copies."""
    for read, master in zip(read_of(layers), masters_of(layers)):
        for a in jax.tree.leaves(read) if read is not master else ():
            if not isinstance(a, jax.ShapeDtypeStruct):
                a.delete()


def moved(a, kind: str):
    """Returns an array, or its shape, in the memory `kind` of its devices. An array that is already
    stored there is returned unchanged.
    """
    sharding = _sharding(a, kind)
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.device_put(a, sharding)


def filled(shapes, layer: Callable[[Any], Any]):
    """Returns stacked arrays whose layer i is `layer(i)`, made in the shardings of `shapes`.

    shapes: a tree of `jax.ShapeDtypeStruct` with shardings over one mesh and a leading axis of
      layers, which is not divided.
    layer: a traceable function of a layer's index. It returns the tree of one layer.
    """
    mesh = jax.tree.leaves(shapes)[0].sharding.mesh
    specs = jax.tree.map(lambda a: a.sharding.spec, shapes)
    fill = filling(layer, length(shapes), mesh, specs)
    return jax.jit(fill, donate_argnums=0)(jax.tree.map(empty, shapes))


def filling(layer: Callable[[Any], Any], count: int, mesh=None, specs=None) -> Callable[[Any], Any]:
    """Returns a function that replaces each of `count` stacked layers by `layer(i)`. If its
    argument is donated, it works in place, and needs the memory of one more layer.

    mesh, specs: the mesh of several devices, and the PartitionSpecs of the stacks. Each device
      makes every layer, or the values of the layer that the device's own parts need.
    """
    kinds = () if mesh is None else mesh.axis_types
    if mesh is None or (mesh.size == 1 and AxisType.Explicit not in kinds):
        return _filling(layer, count)
    if set(kinds) == {AxisType.Explicit}:
        # No `shard_map`: `layer` could close over nothing with such axes, such as a key.
        to = lambda a, spec: jax.reshard(a, NamedSharding(mesh, PartitionSpec(*spec[1:])))
        return _filling(lambda i: jax.tree.map(to, layer(i), specs), count)
    # Unchecked: JAX's types do not show that all devices make equal arrays.
    fill = _filling(lambda i: jax.tree.map(_part, layer(i), specs), count)
    return jax.shard_map(fill, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)


def _filling(layer: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    """Returns a function that fills stacks of `count` layers, one layer at a time."""
    make = lambda stacks, i, _: (put(stacks, layer(i), i), None)
    return lambda stacks: counted(make, stacks, None, 0, count)[0]


def _part(a, spec: PartitionSpec):
    """Returns this device's part of a layer's array. `spec` is the PartitionSpec of the stack."""
    for d, axis in enumerate(spec[1:]):
        if axis is not None:
            size = a.shape[d] // jax.lax.axis_size(axis)
            a = jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(axis) * size, size, d)
    return a


def empty(shape: jax.ShapeDtypeStruct):
    """Returns zeros with the shape and the sharding of `shape`. Zeros in host memory are made
    there, and are not copied through the device.
    """
    sharding: Any = shape.sharding
    if not _on_host(shape):
        return jnp.zeros(shape.shape, shape.dtype, device=sharding)

    # NumPy's zeros take no memory until they are written to, and these zeros never are.
    def part(index):
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, shape.shape)]
        return np.zeros(sizes, shape.dtype)

    return jax.make_array_from_callback(shape.shape, sharding, part)


def _divided(arrays: Sequence, bounds: list[tuple[int, int, str]], kept: Collection[int]) -> list:
    """Returns one array for each stack of `bounds`.

    arrays: the corresponding array of each present stack.
    kept: as for `split`.
    """
    ends = list(itertools.accumulate((len_ for len_, *_ in (a.shape for a in arrays)), initial=0))
    if ends[1:] == [stop for _, stop, _ in bounds]:
        found = [moved(a, kind) for a, (_, _, kind) in zip(arrays, bounds)]
        gone = [a for a, (_, _, kind) in zip(arrays, bounds) if _on_host(a) != (kind == HOST)]
    else:
        a = arrays[0]
        shape = lambda n: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype, sharding=a.sharding)
        found = [moved(shape(stop - start), kind) for start, stop, kind in bounds]
        gone = list(arrays)
        if not isinstance(arrays[0], jax.ShapeDtypeStruct):
            found = [_copied(empty(s), arrays, ends, *bound[:2]) for s, bound in zip(found, bounds)]
    if not isinstance(arrays[0], jax.ShapeDtypeStruct):
        jax.block_until_ready(found)
        for a in gone:
            if id(a) not in kept:
                a.delete()
    return found


def _copied(into, arrays: Sequence, ends: list[int], start: int, stop: int):
    """Fills `into` with layers `start` to `stop`, counted over all of `arrays` in order."""
    for a, (first, last) in zip(arrays, itertools.pairwise(ends)):
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            into = _layers_copied(into, a, begin - start, begin - first, end - begin)
    return into


@functools.partial(jax.jit, static_argnums=(2, 3, 4), donate_argnums=0)
def _layers_copied(into, a, to: int, since: int, count: int):
    """Copies `count` layers of `a`, from layer `since`, to layer `to` of `into`, one by one."""
    body = lambda s, i, _: (put(s, fetch(a, i + (since - to)), i), None)
    return counted(body, into, None, to, count)[0]


def _on_host(a) -> bool:
    """Whether the sharding of an array, or of a shape, is in host memory."""
    return a.sharding is not None and a.sharding.memory_kind == HOST


def _sharding(a, kind: str) -> NamedSharding:
    """Returns the sharding of an array, or of its shape, in the memory `kind` of its devices.

    An array on one device gets a mesh of this device, since JAX traces other shardings in host
    memory as if they were in device memory. A shape without a sharding gets a mesh without devices.
    """
    if isinstance(a.sharding, NamedSharding):
        return NamedSharding(a.sharding.mesh, a.sharding.spec, memory_kind=kind)
    mesh: Any = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    if a.sharding is not None:
        devices = sorted(a.sharding.device_set, key=lambda d: d.id)
        mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)


def sharing(tree) -> dict[int, jax.Array]:
    """Returns the arrays of `tree` that share memory with another leaf of `tree`, by their ids."""
    arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    found = [(a, _buffers(a)) for a in arrays]
    owners = collections.Counter(b for _, buffers in found for b in buffers)
    return {id(a): a for a, buffers in found if any(owners[b] > 1 for b in buffers)}


def delete_unless_in(tree, arrays: dict[int, jax.Array]) -> None:
    """Deletes arrays that `sharing` returned, unless they share memory with an array of `tree`."""
    if not arrays:
        return
    jax.block_until_ready(tree)
    there = set().union(*(_buffers(a) for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)))
    gone = [a for a in arrays.values() if not _buffers(a) & there]
    for a in gone:
        a.delete()


def _buffers(a: jax.Array) -> set[tuple[int, int]]:
    """Returns the device and the address of each part of an array in this process."""
    parts = [shard.data for shard in a.addressable_shards] if a.size else []
    return {(next(iter(part.devices())).id, part.unsafe_buffer_pointer()) for part in parts}
