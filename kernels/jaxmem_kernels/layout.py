"""Shapes arrays as groups of contiguous parts: the parts of a group share its bytes when packed.

Groups lie along the last axis, and the other axes stay as they are, so that a sharded array's codes
are sharded alike. A flat array was the first choice. To flatten a tensor that is divided along its
last axis gathers the tensor, in the references too.

Parts and not neighbours share a byte: strided packing (`q[::2]`) costs XLA a slow concatenation.

Shapes: x (*lead, W) is (*lead, K, parts, H) in groups of G = parts · H values, K = ceil(W / G).
"""

import math

import jax.numpy as jnp

from jaxmem_kernels.typed import whole_groups


def folded(shape: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Returns `shape` with its last axes merged, as few of them as make rows of whole groups; flat
    if no number of them does.
    """
    for axis in range(len(shape) - 1, 0, -1):
        if shape[axis] and (width := math.prod(shape[axis:])) % group == 0:
            return (*shape[:axis], width)
    return (math.prod(shape),)


def fitted(width: int, group: int, parts: int) -> int:
    """Returns the size of the groups of rows of `width` values: `group`, or where a row is shorter
    the least multiple of `parts` that holds it.
    """
    return min(group, -(-max(width, 1) // parts) * parts)


def blocks(x, group: int, parts: int):
    """Returns `x` (*lead, W) as (*lead, K, parts, H). The last group is filled up with the last
    value, which changes neither its greatest nor its least.
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
