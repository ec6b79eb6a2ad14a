"""Rows of an array, and the sums of their values with random signs: what the row ratio is made of.

A row is what shares one ratio: the values along an array's last axis, or along its last axes where
these are short. Rows are told by their number's shape, which is the beginning of the array's.

Signs are independent within a row, and new each step. Rows share them in groups, next to each
other, of which an array has `PATTERNS` or a little more: so few signs are made that sums take as
long as without signs. Rows of a group err alike where their gradients are alike, and others apart.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

SHORTEST = 256  # values, for whose parameters and moments 8 bytes are 0.3 %
# Were all rows of an array alike, their mean would err as one row does over so many steps: it is
# taken for fewer (`ratio.LEAN`).
PATTERNS = 32


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


def patterns(count: int) -> int:
    """Of how many groups, of equally many rows, `count` rows are: PATTERNS, or the next number that
    divides them.
    """
    return next(n for n in range(min(PATTERNS, count), count + 1) if count % n == 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Position:
    """Of which step and of which part of the parameters gradients are. Signs follow from it, so
    that they are the same for every microbatch, device and placement of states.

    step: how many minibatches were finished before this one, int32.
    whole: a tree with the whole arrays' shapes, where gradients are parts; None: they are whole.
    axis_name: the mesh axis over whose devices parts are divided.
    """

    step: Any
    whole: Any = None
    axis_name: str | None = None

    def sums(self, gradient, like):
        """Of each row of a tree of arrays the sum of its values with random signs, as `wide`
        numbers in a tree of `like`'s shapes.
        """
        whole = gradient if self.whole is None else self.whole
        return jax.tree.map(self._sums, gradient, whole, like)

    def _sums(self, g, whole, like):
        g, axes = jnp.asarray(g), like.ndim
        if g.size == 0:
            return jnp.zeros(g.shape[:axes], wide(g.dtype))
        signs = self.signs(g.shape, jnp.shape(whole), axes).astype(g.dtype)
        # The first axis of several may be that of layers, all of which have the same signs.
        layers = g.shape[: _shared(axes)]
        groups = jnp.broadcast_to(signs, (*layers, *signs.shape))
        # A product of each group with its signs: it reads g once, while a sum whose values are
        # scaled one by one is no longer made of vector instructions by XLA:CPU.
        batch = tuple(range(groups.ndim - 1))
        summed = jax.lax.dot_general(
            g.reshape(*groups.shape[:-1], -1, groups.shape[-1]),
            groups,
            (((len(batch) + 1,), (len(batch),)), (batch, batch)),
            precision="highest",
            preferred_element_type=wide(g.dtype),
        )
        return summed.reshape(g.shape[:axes])

    def signs(self, part: tuple[int, ...], whole: tuple[int, ...], axes: int):
        """1 or -1, of shape (groups, values of a row), for an array or a part of it."""
        shared = _shared(axes)
        rows, of = part[shared:axes], whole[shared:axes]
        size = math.prod(of) // patterns(math.prod(of))
        # Where a part's groups are cut, the pieces that it has of them are as long as each other.
        group = self._numbers(rows, of, math.gcd(size, _unbroken(rows, of))) // jnp.uint32(size)
        number = self._numbers(part[axes:], whole[axes:])
        number += group[:, None] * jnp.uint32(math.prod(whole[axes:]) % 2**32)
        of_step = _mixed(jnp.asarray(self.step).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
        mixed = _mixed(number * jnp.uint32(0x9E3779B1) + of_step)
        return jnp.where(mixed >> 31 == 0, 1, -1)

    def _numbers(self, part: tuple[int, ...], whole: tuple[int, ...], apart: int = 1):
        """Of every `apart`-th value of a part, its number in the whole, as uint32."""
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


def _shared(axes: int) -> int:
    """How many axes of rows have one set of signs: the first of several, that may be of layers."""
    return 1 if axes > 1 else 0


def _unbroken(part: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """How many values of a part follow each other in the whole too."""
    axes = [axis for axis, (length, of) in enumerate(zip(part, whole)) if length != of]
    return math.prod(part[max(axes, default=0) :])


def _mixed(h):
    """A hash of 32 bits whose highest bit depends on all of them (MurmurHash3's last steps)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    return (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
