"""Rows of an array, and the sums of their values with random signs, from which the row ratio is
made.

A row is the values that share one ratio: the values along an array's last axis, or along its last
axes if these are short. The shape that counts the rows is the beginning of the array's shape.

Signs are a hash of a value's position and of the step's number. The alternative is a random key. A
hash needs no state, and gives the same signs for every microbatch, device and placement, so that
each of these can be compared with one device. Signs are independent within a row, and new in each
step.

Groups of rows that follow each other share signs. A signed sum is then a matrix product of the
gradient, in the gradient's own layout, and few signs. A sign for each value was the first choice. A
sum that computes anything as it reads, be it a sign, a clip or a selection, is three times as slow
on a CPU, because XLA no longer makes it of vector instructions. For the same reason, sums are made
of the gradient before it is scaled, and the sums are scaled; only clipping by value has to be
written first.

32 groups an array (`PATTERNS`) are enough: the mean of an array's rows then errs by no more than a
row's mean over the 20 steps as which the array counts (`ratio.LEAN`). Rows of a group err alike if
their gradients are alike, and rows of different groups err independently.

Groups are cut from the last axis of rows alone, and their number is divisible by 2 as often as the
length of that axis, up to a factor of 32. XLA then gathers nothing if devices divide an array. On a
mesh with explicit axes a product would need the sharding of its result. There, values are
multiplied by their signs one by one.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._model.tags.operations import wide

SHORTEST = 256  # values, for whose parameters and moments 8 bytes are 0.3 %
# If all rows of an array were alike, the error of their mean would be the error of one row over
# PATTERNS steps; `ratio.LEAN` counts the mean for fewer steps. An array with fewer rows has a group
# for each row.
PATTERNS = 32


def shape_of_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that counts the rows of an array.

    A row shorter than `SHORTEST` extends over the preceding axis, but over neither of the first two
    axes: one of them is the axis of layers in a stacked array, and no ratio belongs to two layers.
    """
    counted = list(shape[:-1])
    while len(counted) > 2 and math.prod(shape[len(counted) :]) < SHORTEST:
        counted.pop()
    return tuple(counted)


def empty(params, dtype_of):
    """Returns zeros for each array of a tree, one for each row. `dtype_of` maps the dtype of an
    array to the dtype of its zeros.
    """

    def one(a):
        rows, dtype = shape_of_rows(jnp.shape(a)), dtype_of(jnp.result_type(a))
        if _is_explicit(a):  # the zeros get the sharding of sums of rows
            return summed(jnp.zeros_like(a), rows).astype(dtype)
        return jnp.zeros(rows, dtype)

    return jax.tree.map(one, params)


def real(dtype):
    """Returns the dtype of a row's sum of squares, which is real for complex values too."""
    return jnp.finfo(wide(dtype)).dtype


def summed(a, rows: tuple[int, ...]):
    """Returns the sum of the values of each row. `rows` is the shape that counts the rows."""
    return a.astype(wide(a.dtype)).sum(tuple(range(len(rows), a.ndim)))


def square(a):
    """Returns |a|², which is real for complex values too."""
    return jnp.real(a * jnp.conj(a)) if jnp.iscomplexobj(a) else a * a


def spread(ratio, like):
    """Returns one factor for each row in a shape and a dtype to multiply an array like `like`
    by.
    """
    return ratio.reshape(ratio.shape + (1,) * (like.ndim - ratio.ndim)).astype(like.dtype)


def patterns(count: int, before: int = 1) -> int:
    """Returns the number of groups of equal size along an axis of `count` rows.

    before: the product of the other axes that count rows. The number of groups, times `before`, is
      at least PATTERNS, if there are as many rows.

    The number is divisible by 2 as often as `count`, up to a factor of 32, so that devices which
    divide the rows divide the groups.
    """
    halves = math.gcd(count, 32)
    enough = (n for n in range(1, count + 1) if count % n == 0 and before * n >= PATTERNS)
    return next((n for n in enough if n == 1 or n % halves == 0), count)


@dataclasses.dataclass(frozen=True, eq=False)
class Position:
    """The step and the part of the parameters to which gradients belong. Signs depend on nothing
    else, so they are equal for every microbatch, device and placement of states.

    step: number of minibatches that were finished before this one, int32.
    whole: a tree with the whole arrays' shapes, if gradients are parts. None: gradients are whole.
    axis_name: the mesh axis over whose devices parts are divided.
    stacked: whether the first of several axes that count rows may be the axis of layers. All layers
      have equal signs, whether they are stacked or not.
    """

    step: Any
    whole: Any = None
    axis_name: str | None = None
    stacked: bool = True

    def sums(self, gradient, like):
        """Returns the sum of each row's values with random signs, in the dtype `wide` and in a tree
        of `like`'s shapes.
        """
        whole = gradient if self.whole is None else self.whole
        return jax.tree.map(self._sums, gradient, whole, like)

    def _sums(self, g, whole, like):
        """Returns the signed sums of the rows of one array."""
        g, axes = jnp.asarray(g), like.ndim
        if g.size == 0:
            return jnp.zeros(like.shape, wide(g.dtype))
        signs = self.signs(g.shape, jnp.shape(whole), axes).astype(g.dtype)
        layers = g.shape[: self._shared(axes)]
        signs = jnp.broadcast_to(signs, (*layers, *signs.shape))
        if _is_explicit(g):
            # A matrix product would need the sharding of its result.
            size = g.size // signs.size
            each = jnp.repeat(signs, size, max(axes - 1, 0)).reshape(g.shape)
            return summed(g * each, like.shape)
        # A product of each group with its signs reads g once. XLA:CPU does not make a sum of values
        # that are scaled one by one of vector instructions. No axes are merged, and only the last
        # axis of rows is split, so that arrays remain divided over devices.
        batch = tuple(range(max(axes, 1)))
        values = g.ndim - axes
        lhs, rhs = (tuple(range(len(batch) + more, len(batch) + more + values)) for more in (1, 0))
        rows = (*g.shape[: max(axes - 1, 0)], signs.shape[len(batch) - 1], -1)
        sums = jax.lax.dot_general(
            g.reshape(*rows, *g.shape[axes:]),
            signs,
            ((lhs, rhs), (batch, batch)),
            precision="highest",
            preferred_element_type=wide(g.dtype),
        )
        return sums.reshape(like.shape)

    def _shared(self, axes: int) -> int:
        """Returns the number of axes that count rows and share one set of signs: 0 or 1."""
        return 1 if self.stacked and axes > 1 else 0

    def signs(self, part: tuple[int, ...], whole: tuple[int, ...], axes: int):
        """Returns the signs, 1 or -1, of an array or of a part of the array. Their shape is the
        shape that counts rows, with groups in place of the last axis, and then the shape of a row.

        part: the shape of the part.
        whole: the shape of the whole array.
        axes: the number of axes that count rows.
        """
        shared = self._shared(axes)
        *before, count = part[shared:axes] or (1,)
        *before_of, of = whole[shared:axes] or (1,)
        groups = patterns(of, math.prod(before_of))
        # If a part has pieces of groups, all pieces have one length.
        piece = math.gcd(of // groups, count)
        along = self._numbers((count,), (of,), piece) // jnp.uint32(of // groups)
        group = self._numbers(tuple(before), tuple(before_of))[:, None] * jnp.uint32(groups)
        group = group + along[None]
        values = math.prod(whole[axes:]) % 2**32
        number = self._numbers(part[axes:], whole[axes:])[None, None]
        number = number + group[:, :, None] * jnp.uint32(values)
        of_step = mixed(jnp.asarray(self.step).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
        hashed = mixed(number * jnp.uint32(0x9E3779B1) + of_step)
        signs = jnp.where(hashed >> 31 == 0, 1, -1)
        return signs.reshape(*before, count // piece, *part[axes:])

    def _numbers(self, part: tuple[int, ...], whole: tuple[int, ...], apart: int = 1):
        """Returns the number in the whole array of every `apart`-th value of a part, as uint32."""
        own = jax.lax.iota(jnp.uint32, math.prod(part) // apart) * jnp.uint32(apart)
        if part == whole:
            return own
        number = jnp.zeros_like(own)
        for axis, (length, of) in enumerate(zip(part, whole, strict=True)):
            along = own // jnp.uint32(math.prod(part[axis + 1 :])) % jnp.uint32(length)
            if length != of:
                assert self.axis_name is not None, "arrays are parts, and there is no axis"
                along += (jax.lax.axis_index(self.axis_name) * length).astype(jnp.uint32)
            number += along * jnp.uint32(math.prod(whole[axis + 1 :]) % 2**32)
        return number


def _is_explicit(a) -> bool:
    """Whether the type of an array divides it over devices (a mesh with explicit axes)."""
    return any(axes is not None for axes in jax.typeof(a).sharding.spec)


def mixed(h):
    """Returns a hash of 32 bits whose highest bit depends on all 32 bits (the last steps of
    MurmurHash3).
    """
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    return (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
