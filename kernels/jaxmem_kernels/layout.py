"""Shapes arrays as groups of contiguous parts: the parts of a group share its bytes when packed.

Groups run along the last axis, and the other axes are not changed. So the codes of a sharded array
have the array's sharding. A flat array was the first choice. Flattening a tensor that is divided
along its last axis gathers the tensor, in the references too.

Values of different parts share a byte, not adjacent values: strided packing (`q[::2]`) costs XLA a
slow concatenation.

On meshes with explicit axes (`AxisType.Explicit`), the types of arrays have their shardings. JAX
never reshards these arrays by itself, and refuses operations that need a resharding. Functions of
this file reshard them.

Shapes: x (*lead, W) is (*lead, K, parts, H) in groups of G = parts · H values, K = ceil(W / G).
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def folded(shape: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Returns `shape` with its last axes merged: as few axes as make rows of whole groups, or all
    axes if no number of axes does.
    """
    for axis in range(len(shape) - 1, 0, -1):
        if shape[axis] and (width := math.prod(shape[axis:])) % group == 0:
            return (*shape[:axis], width)
    return (math.prod(shape),)


def fitted(width: int, group: int, parts: int) -> int:
    """Returns the size of the groups of rows of `width` values: `group`, or the least multiple of
    `parts` that is not below `width`, if that is smaller.
    """
    return min(group, -(-max(width, 1) // parts) * parts)


def blocks(x, group: int, parts: int):
    """Returns `x` (*lead, W) as (*lead, K, parts, H). The last group is padded with the last value,
    which changes neither the greatest nor the least value of the group.
    """
    x = whole_groups(x, group)
    width = x.shape[-1]
    count = -(-width // group)
    if missing := count * group - width:
        last = jnp.broadcast_to(x[..., -1:], (*x.shape[:-1], missing))
        x = jnp.concatenate([x, last], -1)
    return x.reshape(*x.shape[:-1], count, parts, group // parts)


def unblocked(blocks, width: int):
    """The inverse of `blocks`: (*lead, W)."""
    rows = blocks.reshape(*blocks.shape[:-3], math.prod(blocks.shape[-3:]))
    return rows if rows.shape[-1] == width else rows[..., :width]


def undivided(x):
    """Reshards `x` so that its last axis is not divided."""
    typed = jax.typeof(x).sharding
    if typed.mesh.empty or not x.ndim or typed.spec[-1] is None:
        return x
    return jax.sharding.reshard(x, _but_last(typed))


def whole_groups(x, group: int):
    """Reshards `x` so that its last axis is divided only between groups of `group` values."""
    typed = jax.typeof(x).sharding
    if typed.mesh.empty or x.shape[-1] % (_parts(typed) * group) == 0:
        return x
    return undivided(x)


def as_rows(x, shape: tuple[int, ...]):
    """Reshapes `x` to `shape`. A row of `shape` may consist of several whole rows of `x`."""
    return x if x.shape == shape else undivided(x).reshape(shape)


def channels_of(x, index):
    """Returns the channels of `x` at `index`, whole on every device. A channel is an index of the
    last axis. The result has zeros for an index beyond the last channel.
    """
    typed = jax.typeof(x).sharding
    where = None if typed.mesh.empty or typed.spec[-1] is None else _but_last(typed)
    return x.at[..., index].get(mode="fill", fill_value=0, out_sharding=where)


def _parts(typed: NamedSharding) -> int:
    """Returns the number of devices that divide the last axis."""
    names = typed.spec[-1]
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(typed.mesh.shape[name] for name in names if name is not None)


def _but_last(typed: NamedSharding) -> NamedSharding:
    return NamedSharding(typed.mesh, PartitionSpec(*typed.spec[:-1], None))
