"""A state's arrays as orbax stores them, one by one under numbers, and back in the tree that they
came from.
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
from jaxmem._train.checkpoints.manifest import Leaf
from jaxmem.errors import RunError

STATE = "state"  # the folder in a checkpoint's that orbax writes


def writer(processes: Channel):
    """What stores arrays in the background, each process those parts that its devices hold."""
    ocp = orbax()
    if processes.alone:
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    together = ocp.options.MultiprocessingOptions(active_processes=set(range(processes.count)))

    def met(*, key: str, timeout_ms: int) -> None:
        """Where one has failed, the others hear of it, and do not wait for it in vain."""
        processes.agreed(lambda: None)

    meet = ocp.options.AsyncOptions(barrier_sync_fn=met)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=together)
    return ocp.AsyncCheckpointer(handler, async_options=meet, multiprocessing_options=together)


def write(writer, folder: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Begins to store what `taken` told. It returns when the arrays were copied."""
    writer.save(folder / STATE, args=orbax().args.PyTreeSave(dict(arrays)))


def shape(leaf):
    """The shape of an array and where it lies; numbers and NumPy's arrays are what they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    weak, place = getattr(leaf, "weak_type", False), _place(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak)


def taken(state) -> tuple[dict[str, Any], tuple[Leaf, ...]]:
    """A state's arrays by number, and what they are. Empty arrays are told, but not stored. What
    only this process has it must have as all others do: the first one writes it.
    """
    arrays, leaves = {}, []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        leaves.append(_leaf(path, leaf))
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if jnp.size(data):
            arrays[_name(number)] = data if _is_stored_by_all(data) else np.asarray(data)
    return arrays, tuple(leaves)


def check(leaves: Sequence[Leaf], like: Sequence[tuple[Any, Any]]) -> None:
    """Raises RunError, naming the first array that differs, unless the leaves are those of `like`,
    those of a state with their paths, or their shapes.
    """
    expected = [_leaf(path, leaf) for path, leaf in like]
    told = lambda leaf: f"{leaf.path or 'an array'} {leaf.dtype}{list(leaf.shape)}"
    # A number of Python's may have become an array, of another dtype: of that there is one value.
    free = lambda leaf: (leaf.path, leaf.shape)
    same = lambda leaf: (*free(leaf), leaf.dtype, leaf.key)
    for got, want in zip(leaves, expected):
        of = free if want.kind == "number" else same
        if of(got) != of(want):
            raise RunError(
                f"train: the checkpoint holds {told(got)} where the state has {told(want)};"
                " expected the state of the run that it is of: the same model and optimizer, or"
                " another folder"
            )
    if len(leaves) != len(expected):
        raise RunError(
            f"train: the checkpoint holds {len(leaves)} arrays, and the state has {len(expected)};"
            " expected the state of the run that it is of: the same model and optimizer, or"
            " another folder"
        )


def read(folder: pathlib.Path, leaves: Sequence[Leaf], like: Sequence[tuple[Any, Any]]) -> list:
    """What a checkpoint holds of each of `like`, the leaves of a state with their paths. Arrays lie
    where those of `like` do, or say they should: `jax.ShapeDtypeStruct` with a sharding. Of an
    array that is divided each process reads what its devices hold, however it was divided before.
    """
    check(leaves, like)
    ocp = orbax()
    how = [_how(ocp, leaf, was) for leaf, (_, was) in zip(leaves, like, strict=True)]
    found = _restored(folder, leaves, how)
    return [placed(*one) for one in zip(found, leaves, [was for _, was in like])]


def arrays(folder: pathlib.Path, leaves: Sequence[Leaf]) -> list:
    """All arrays of a checkpoint, whole and NumPy's."""
    return _restored(folder, leaves, [orbax().RestoreArgs(restore_type=np.ndarray)] * len(leaves))


def _restored(folder: pathlib.Path, leaves: Sequence[Leaf], how: Sequence) -> list:
    """The arrays of a checkpoint, each restored as `how` says. Those without a value are made."""
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
    """How orbax restores an array: to where it shall lie, or whole, as NumPy's."""
    place = _place(was)
    if leaf.kind != "array" or leaf.key is not None or leaf.weak or place is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=place, global_shape=leaf.shape, dtype=leaf.dtype)


def placed(array, leaf: Leaf, was):
    """An array that was read whole, where `was` lies or says it should, as what it was."""
    if isinstance(array, jax.Array):
        return array
    if leaf.kind == "number":
        number = array[()].item()
        return jnp.asarray(number) if isinstance(was, jax.ShapeDtypeStruct) else number
    if leaf.kind == "numpy":
        return array
    place = _place(was)
    if leaf.key is None and not leaf.weak:
        return _laid(array, place)
    make: Callable[[Any], jax.Array] = _weak
    if leaf.key is not None:
        make = functools.partial(jax.random.wrap_key_data, impl=leaf.key)
    if place is None or place.is_fully_addressable:
        return _laid(make(jnp.asarray(array)), place)
    return jax.jit(make, out_shardings=place)(array)


def _laid(array, place):
    """An array of this process at a place, which may be of several."""
    if place is None:
        return jnp.asarray(array)
    if place.is_fully_addressable:
        return jax.device_put(array, place)
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])


def _place(leaf):
    """Where an array lies, or should; None where JAX may move it to where others are: else it would
    keep them from where they are.
    """
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)


def _weak(array) -> jax.Array:
    """The same with a weak type, which an array has that was made of Python's numbers alone."""
    made = jnp.full(array.shape, array.dtype.type(0).item())
    return made.at[...].set(array) if made.dtype == array.dtype else jnp.asarray(array)


def _is_stored_by_all(data) -> bool:
    """Whether orbax takes an array as it is. Of several processes it takes those that all have a
    part of; of one, all of JAX's.
    """
    if not isinstance(data, jax.Array):
        return False
    return jax.process_count() == 1 or not data.is_fully_addressable


def _name(number: int) -> str:
    return f"{number:06d}"


def _is_key(leaf) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf) -> str:
    if isinstance(leaf, bool | int | float | complex):
        return "number"
    return "numpy" if isinstance(leaf, np.ndarray | np.generic) else "array"


def _leaf(path, leaf) -> Leaf:
    """What an array, its shape, or a number is."""
    name, kind = jax.tree_util.keystr(path), _kind(leaf)
    if not _is_key(leaf):
        of = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        weak = kind == "array" and getattr(leaf, "weak_type", False)
        return Leaf(name, tuple(of.shape), str(of.dtype), None, kind, weak)
    box = []

    def data(key):
        box.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    of = jax.eval_shape(data, leaf)
    return Leaf(name, of.shape, str(of.dtype), box[0], kind)
