"""A state's arrays as orbax stores them, one by one under numbers, and back in the tree that they
came from.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._runs.manifest import Leaf
from jaxmem.errors import RunError

STATE = "state"  # the folder in a checkpoint's that orbax writes


def orbax():
    """orbax.checkpoint. Raises RunError with the command that installs it where it is missing."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise RunError(
            f"checkpoints are written by orbax, which cannot be imported ({error}); install it: pip"
            " install jaxmem[runs]"
        ) from error
    return orbax.checkpoint


def shape(leaf):
    """The shape of an array and where it lies; numbers and NumPy's arrays are what they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)


def taken(state) -> tuple[dict[str, Any], tuple[Leaf, ...]]:
    """A state's arrays by number, and what they are. Empty arrays are told, but not stored."""
    arrays, leaves = {}, []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        leaves.append(_leaf(path, leaf))
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if jnp.size(data):
            arrays[_name(number)] = data if isinstance(data, jax.Array) else np.asarray(data)
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
    where those of `like` do, or say they should: `jax.ShapeDtypeStruct` with a sharding.
    """
    check(leaves, like)
    ocp = orbax()
    names = [_name(n) for n, leaf in enumerate(leaves) if np.prod(leaf.shape, dtype=np.int64)]
    arguments = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
    item = dict.fromkeys(names, 0)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        arrays = checkpointer.restore(folder / STATE, args=args)
    return [
        _placed(arrays.get(_name(n)), leaf, was)
        for n, (leaf, (_, was)) in enumerate(zip(leaves, like, strict=True))
    ]


def _placed(array, leaf: Leaf, was):
    array = np.zeros(leaf.shape, jnp.dtype(leaf.dtype)) if array is None else array
    if leaf.kind == "number":
        number = array[()].item()
        return jnp.asarray(number) if isinstance(was, jax.ShapeDtypeStruct) else number
    if leaf.kind == "numpy":
        return array
    array = _weak(array) if leaf.weak else array
    # What JAX may move stays so; else it would keep others from where they are.
    sharding = None if leaf.kind == "free" else getattr(was, "sharding", None)
    if leaf.key is not None:
        made = jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.key)
        return made if sharding is None else jax.device_put(made, sharding)
    if sharding is None:
        return jnp.asarray(array)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _weak(array: np.ndarray) -> jax.Array:
    """The same with a weak type, which an array has that was made of Python's numbers alone."""
    made = jnp.full(array.shape, array.dtype.type(0).item())
    return made.at[...].set(array) if made.dtype == array.dtype else jnp.asarray(array)


def _name(number: int) -> str:
    return f"{number:06d}"


def _is_key(leaf) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf) -> str:
    if isinstance(leaf, jax.Array):
        return "array" if getattr(leaf, "committed", True) else "free"
    if isinstance(leaf, bool | int | float | complex):
        return "number"
    return "numpy" if isinstance(leaf, np.ndarray | np.generic) else "array"


def _leaf(path, leaf) -> Leaf:
    """What an array, its shape, or a number is."""
    name, kind = jax.tree_util.keystr(path), _kind(leaf)
    if not _is_key(leaf):
        of = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        weak = kind in ("array", "free") and getattr(leaf, "weak_type", False)
        return Leaf(name, tuple(of.shape), str(of.dtype), None, kind, weak)
    box = []

    def data(key):
        box.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    of = jax.eval_shape(data, leaf)
    return Leaf(name, of.shape, str(of.dtype), box[0], kind)
