"""Stores the arrays of a state with orbax, one by one under numbers, and restores them into the
state's tree.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._target.processes.channel import Channel
from jaxmem._target.processes.orbax import orbax
from jaxmem._trace.arguments import key_impl
from jaxmem._train.checkpoints.manifest import Leaf
from jaxmem.errors import RunError

STATE = "state"  # the folder in a checkpoint's that orbax writes


def writer(processes: Channel):
    """An orbax checkpointer that stores arrays in the background. Each process stores the parts on
    its devices.
    """
    ocp = orbax()
    if processes.alone:
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    together = ocp.options.MultiprocessingOptions(active_processes=set(range(processes.count)))

    def met(*, key: str, timeout_ms: int) -> None:
        """A barrier. If a process has failed, the others receive its error instead of waiting."""
        processes.agreed(lambda: None)

    meet = ocp.options.AsyncOptions(barrier_sync_fn=met)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=together)
    return ocp.AsyncCheckpointer(handler, async_options=meet, multiprocessing_options=together)


def write(writer, folder: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Starts to store the arrays that `taken` returned. Returns once the arrays are copied."""
    writer.save(folder / STATE, args=orbax().args.PyTreeSave(dict(arrays)))


def shape(leaf):
    """The shape and the placement of an array. Numbers and NumPy's arrays stay unchanged."""
    if not isinstance(leaf, jax.Array):
        return leaf
    weak, sharding = getattr(leaf, "weak_type", False), _sharding(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def taken(state) -> tuple[dict[str, Any], tuple[Leaf, ...]]:
    """The arrays of a state by number, and their descriptions. Empty arrays are described and not
    stored. An array that only this process holds must be equal in all processes: the first one
    writes it.
    """
    arrays, leaves = {}, []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        leaves.append(_leaf(path, leaf))
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if jnp.size(data):
            arrays[_name(number)] = data if _is_stored_by_all(data) else np.asarray(data)
    return arrays, tuple(leaves)


def changed(new, like: Sequence[tuple[Any, Any]]) -> str:
    """The first array of the state `new` that differs from the state `like`, in words; "" if none
    does. Without x64, a NumPy array of 64 bits may become an array of 32 bits.
    """
    of_jax = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.result_type(a))
    bits = lambda a: of_jax(a) if isinstance(a, np.ndarray | np.generic) else a
    leaves = [_leaf(path, bits(a)) for path, a in jax.tree.leaves_with_path(new)]
    return difference(leaves, [(path, bits(a)) for path, a in like])


def difference(leaves: Sequence[Leaf], like: Sequence[tuple[Any, Any]]) -> str:
    """The first array of `leaves` that differs from the state `like`, in words; "" if none does."""
    expected = [_leaf(path, leaf) for path, leaf in like]
    told = lambda leaf: f"{leaf.path or 'an array'} {leaf.dtype}{list(leaf.shape)}"
    # A number of Python's may have become an array, of another dtype: of that there is one value.
    free = lambda leaf: (leaf.path, leaf.shape)
    same = lambda leaf: (*free(leaf), leaf.dtype, leaf.key)
    for got, want in zip(leaves, expected):
        of = free if want.kind == "number" else same
        if of(got) != of(want):
            return f"{told(got)} where the state has {told(want)}"
    if len(leaves) != len(expected):
        return f"{len(leaves)} arrays, and the state has {len(expected)}"
    return ""


def another_state(holds: str) -> RunError:
    """The error for a checkpoint of another state than the requested one."""
    return RunError(
        f"train: the checkpoint holds {holds}; expected the state of the run that it is of: the"
        " same model and optimizer, or another folder"
    )


def read(folder: pathlib.Path, leaves: Sequence[Leaf], like: Sequence[tuple[Any, Any]]) -> list:
    """Reads the array of each leaf of `like` from a checkpoint.

    like: the leaves of a state, or their shapes, with their paths. An array is placed by the
      sharding of its leaf. Each process reads the parts of a divided array that are on its devices,
      however the array was divided when it was saved.

    Raises RunError, which names the first array that differs, unless `leaves` describe the state
    `like`.
    """
    if differs := difference(leaves, like):
        raise another_state(differs)
    ocp = orbax()
    how = [_how(ocp, leaf, was) for leaf, (_, was) in zip(leaves, like, strict=True)]
    found = _restored(folder, leaves, how)
    return [placed(*one) for one in zip(found, leaves, [was for _, was in like])]


def arrays(folder: pathlib.Path, leaves: Sequence[Leaf]) -> list:
    """All arrays of a checkpoint, as whole NumPy arrays."""
    return _restored(folder, leaves, [orbax().RestoreArgs(restore_type=np.ndarray)] * len(leaves))


def _restored(folder: pathlib.Path, leaves: Sequence[Leaf], how: Sequence) -> list:
    """The arrays of a checkpoint, each restored as `how` says. Empty arrays are made."""
    ocp = orbax()
    names = {n: _name(n) for n, leaf in enumerate(leaves) if math.prod(leaf.shape)}
    # Each process reads by itself, and waits for no other.
    mine = jax.process_index()
    among = {mine} if jax.process_count() > 1 else None
    by = ocp.options.MultiprocessingOptions(mine, among)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=by)
    with ocp.Checkpointer(handler, multiprocessing_options=by) as checkpointer:
        arguments = {name: how[n] for n, name in names.items()}
        item = dict.fromkeys(arguments, 0)
        args = ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        found = checkpointer.restore(folder / STATE, args=args)
    empty = lambda leaf: np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
    return [found[names[n]] if n in names else empty(leaf) for n, leaf in enumerate(leaves)]


def _how(ocp, leaf: Leaf, was):
    """How orbax restores an array: with its sharding, or as a whole NumPy array."""
    sharding = _sharding(was)
    if leaf.kind != "array" or leaf.key is not None or leaf.weak or sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def placed(array, leaf: Leaf, was):
    """Places an array that was read whole like `was`, and restores its type."""
    if isinstance(array, jax.Array):
        return array
    if leaf.kind == "number":
        number = array[()].item()
        return jnp.asarray(number) if isinstance(was, jax.ShapeDtypeStruct) else number
    if leaf.kind == "numpy":
        return array
    sharding = _sharding(was)
    if leaf.key is None and not leaf.weak:
        return _laid(array, sharding)
    make: Callable[[Any], jax.Array] = _weak
    if leaf.key is not None:
        make = functools.partial(jax.random.wrap_key_data, impl=leaf.key)
    if sharding is None or sharding.is_fully_addressable:
        return _laid(make(jnp.asarray(array)), sharding)
    return jax.jit(make, out_shardings=sharding)(array)


def _laid(array, sharding):
    """Places an array of this process, also over the devices of several processes."""
    if sharding is None:
        return jnp.asarray(array)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _sharding(leaf):
    """The sharding of an array, or the requested one; None for an array that is not committed,
    which JAX may move to the other operands.
    """
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)


def _weak(array) -> jax.Array:
    """The array with a weak type, which arrays of Python's numbers have."""
    made = jnp.full(array.shape, array.dtype.type(0).item())
    return made.at[...].set(array) if made.dtype == array.dtype else jnp.asarray(array)


def _is_stored_by_all(data) -> bool:
    """Whether orbax takes an array unchanged: with several processes only arrays that all of them
    hold a part of, with one process all of JAX's arrays.
    """
    if not isinstance(data, jax.Array):
        return False
    return jax.process_count() == 1 or not data.is_fully_addressable


def _name(number: int) -> str:
    """The file name of a leaf, which sorts by number."""
    return f"{number:06d}"


def _is_key(leaf) -> bool:
    """Whether a leaf is a random key."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf) -> str:
    """What a leaf is restored as: a number, a NumPy array or a JAX array."""
    if isinstance(leaf, bool | int | float | complex):
        return "number"
    return "numpy" if isinstance(leaf, np.ndarray | np.generic) else "array"


def _leaf(path, leaf) -> Leaf:
    """Describes an array, its shape, or a number."""
    name, kind = jax.tree_util.keystr(path), _kind(leaf)
    if not _is_key(leaf):
        of = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        weak = kind == "array" and getattr(leaf, "weak_type", False)
        return Leaf(name, tuple(of.shape), str(of.dtype), None, kind, weak)
    of = jax.eval_shape(jax.random.key_data, leaf)
    return Leaf(name, of.shape, str(of.dtype), str(key_impl(leaf)), kind)
