"""Arrays on meshes with explicit axes (`AxisType.Explicit`), whose types say how devices share
them. JAX moves none of them by itself, and refuses what would.
"""

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec


def undivided(x):
    """`x` with its last axis whole on every device."""
    typed = jax.typeof(x).sharding
    if typed.mesh.empty or not x.ndim or typed.spec[-1] is None:
        return x
    return jax.sharding.reshard(x, _but_last(typed))


def whole_groups(x, group: int):
    """`x` with its last axis divided between groups of so many values at most, never within one."""
    typed = jax.typeof(x).sharding
    if typed.mesh.empty or x.shape[-1] % (_parts(typed) * group) == 0:
        return x
    return undivided(x)


def as_rows(x, shape: tuple[int, ...]):
    """`x` in a shape whose last axis may hold several of its rows, each of them whole."""
    return x if x.shape == shape else undivided(x).reshape(shape)


def channels_of(x, index):
    """Returns the channels (of the last axis) of `x` with these numbers, whole on every device;
    zeros where there is none of a number.
    """
    typed = jax.typeof(x).sharding
    where = None if typed.mesh.empty or typed.spec[-1] is None else _but_last(typed)
    return x.at[..., index].get(mode="fill", fill_value=0, out_sharding=where)


def _parts(typed: NamedSharding) -> int:
    """How many devices share the last axis."""
    names = typed.spec[-1]
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(typed.mesh.shape[name] for name in names if name is not None)


def _but_last(typed: NamedSharding) -> NamedSharding:
    return NamedSharding(typed.mesh, PartitionSpec(*typed.spec[:-1], None))
