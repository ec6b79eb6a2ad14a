"""Rows of an array, and random signs of its values: what the row ratio is made of.

A row is what shares one ratio: the values along an array's last axis, or along its last axes where
these are short. Rows are told by their number's shape, which is the beginning of the array's.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

SHORTEST = 256  # values, for whose parameters and moments 8 bytes are 0.3 %


def shape_of_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many rows an array has, along each axis that they are counted by.

    Rows shorter than `SHORTEST` take in the axis before them, but neither of the first two: of an
    array that is stacked by layers one of these is that of layers, and no ratio is of two layers.
    """
    counted = list(shape[:-1])
    while len(counted) > 2 and math.prod(shape[len(counted) :]) < SHORTEST:
        counted.pop()
    return tuple(counted)


def empty(params, dtype_of):
    """Zeros, one a row, for each array of a tree. `dtype_of` makes their dtype of an array's."""
    return jax.tree.map(
        lambda a: jnp.zeros(shape_of_rows(jnp.shape(a)), dtype_of(jnp.result_type(a))), params
    )


def wide(dtype):
    """The dtype of a row's sum of values: float32 at least."""
    return jnp.promote_types(jnp.float32, dtype)


def real(dtype):
    """The same of squares, which are real for complex values too."""
    return jnp.finfo(wide(dtype)).dtype


def summed(a, rows: tuple[int, ...]):
    """The sums of the values of each row; `rows` is the shape that numbers them."""
    return a.astype(wide(a.dtype)).sum(tuple(range(len(rows), a.ndim)))


def square(a):
    """|a|², which is real for complex values too."""
    return jnp.real(a * jnp.conj(a)) if jnp.iscomplexobj(a) else a * a


def spread(ratio, like):
    """One value a row beside all values of the row, to multiply an array like `like` by."""
    return ratio.reshape(ratio.shape + (1,) * (like.ndim - ratio.ndim)).astype(like.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Position:
    """Of which step and of which part of the parameters gradients are. Signs follow from it, so
    that they are the same for every microbatch, device and placement of states.

    step: how many minibatches were finished before this one, int32.
    layer: the number of the layer whose gradient it is, within its stack; 0 for whole arrays.
    whole: a tree with the whole arrays' shapes, where gradients are parts; None: they are whole.
    axis_name: the mesh axis over whose devices parts are divided.
    """

    step: Any
    layer: Any = 0
    whole: Any = None
    axis_name: str | None = None

    def signs(self, gradient):
        """A tree like `gradient` of random signs, 1 or -1, in its dtypes."""
        whole = gradient if self.whole is None else self.whole
        return jax.tree.map(self._signs, gradient, whole)

    def _signs(self, g, whole):
        # The number of each value in its whole stack, modulo 2^32, is hashed with the step's.
        number = jnp.asarray(self.layer).astype(jnp.uint32) * jnp.uint32(whole.size % 2**32)
        stride = whole.size
        for axis, (length, of) in enumerate(zip(g.shape, whole.shape, strict=True)):
            stride //= max(of, 1)
            along = jax.lax.broadcasted_iota(jnp.uint32, g.shape, axis)
            if length != of:
                assert self.axis_name is not None, "arrays are parts, and there is no axis"
                along += (jax.lax.axis_index(self.axis_name) * length).astype(jnp.uint32)
            number += along * jnp.uint32(stride % 2**32)
        of_step = _mixed(jnp.asarray(self.step).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
        mixed = _mixed(number * jnp.uint32(0x9E3779B1) + of_step)
        return jnp.where(mixed >> 31 == 0, 1, -1).astype(g.dtype)


def _mixed(h):
    """A hash of 32 bits whose highest bit depends on all of them (MurmurHash3's last steps)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    return (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
