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
row's mean over the 20 steps that the array stands for (`ratio.LEAN`). Rows of a group err alike if
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

SHORTEST = 256  # values, for whose parameters and moments 8 bytes are 0.3 %
# Were all rows of an array alike, their mean would err as one row does over so many steps: it is
# taken for fewer (`ratio.LEAN`). An array with fewer rows has a group for each.
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

    def one(a):
        rows, dtype = shape_of_rows(jnp.shape(a)), dtype_of(jnp.result_type(a))
        if _is_explicit(a):  # rows lie where sums of them do
            return summed(jnp.zeros_like(a), rows).astype(dtype)
        return jnp.zeros(rows, dtype)

    return jax.tree.map(one, params)


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


def patterns(count: int, before: int = 1) -> int:
    """In how many groups, of equally many rows, `count` rows are that follow each other, `before`
    times: so many that all groups are PATTERNS at least, and as often divided by 2 as the rows are,
    up to 32, so that devices which divide the rows divide the groups.
    """
    halves = math.gcd(count, 32)
    enough = (n for n in range(1, count + 1) if count % n == 0 and before * n >= PATTERNS)
    return next((n for n in enough if n == 1 or n % halves == 0), count)


@dataclasses.dataclass(frozen=True, eq=False)
class Position:
    """Of which step and of which part of the parameters gradients are. Signs follow from it, so
    that they are the same for every microbatch, device and placement of states.

    step: how many minibatches were finished before this one, int32.
    whole: a tree with the whole arrays' shapes, where gradients are parts; None: they are whole.
    axis_name: the mesh axis over whose devices parts are divided.
    stacked: whether the first axis of several that count rows may be that of layers, which have the
      same signs, whether they are stacked or alone.
    """

    step: Any
    whole: Any = None
    axis_name: str | None = None
    stacked: bool = True

    def sums(self, gradient, like):
        """Of each row of a tree of arrays the sum of its values with random signs, as `wide`
        numbers in a tree of `like`'s shapes.
        """
        whole = gradient if self.whole is None else self.whole
        return jax.tree.map(self._sums, gradient, whole, like)

    def _sums(self, g, whole, like):
        g, axes = jnp.asarray(g), like.ndim
        if g.size == 0:
            return jnp.zeros(like.shape, wide(g.dtype))
        signs = self.signs(g.shape, jnp.shape(whole), axes).astype(g.dtype)
        layers = g.shape[: self._shared(axes)]
        signs = jnp.broadcast_to(signs, (*layers, *signs.shape))
        if _is_explicit(g):
            # A product would have to be told where its result lies.
            size = g.size // signs.size
            each = jnp.repeat(signs, size, max(axes - 1, 0)).reshape(g.shape)
            return summed(g * each, like.shape)
        # A product of each group with its signs: it reads g once, while a sum whose values are
        # scaled one by one is no longer made of vector instructions by XLA:CPU. No axes are merged,
        # and only the last of rows is split, so that what is divided over devices stays so.
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
        """How many of the axes that count rows have one set of signs."""
        return 1 if self.stacked and axes > 1 else 0

    def signs(self, part: tuple[int, ...], whole: tuple[int, ...], axes: int):
        """1 or -1 for an array or a part of it, of the shape that counts its rows, where groups
        stand for the last axis, and a row's.
        """
        shared = self._shared(axes)
        *before, count = part[shared:axes] or (1,)
        *before_of, of = whole[shared:axes] or (1,)
        groups = patterns(of, math.prod(before_of))
        # Where a part's groups are cut, the pieces that it has of them are as long as each other.
        piece = math.gcd(of // groups, count)
        along = self._numbers((count,), (of,), piece) // jnp.uint32(of // groups)
        group = self._numbers(tuple(before), tuple(before_of))[:, None] * jnp.uint32(groups)
        group = group + along[None]
        values = math.prod(whole[axes:]) % 2**32
        number = self._numbers(part[axes:], whole[axes:])[None, None]
        number = number + group[:, :, None] * jnp.uint32(values)
        of_step = _mixed(jnp.asarray(self.step).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
        mixed = _mixed(number * jnp.uint32(0x9E3779B1) + of_step)
        signs = jnp.where(mixed >> 31 == 0, 1, -1)
        return signs.reshape(*before, count // piece, *part[axes:])

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


def _is_explicit(a) -> bool:
    """Whether the type of an array says that it is divided over devices."""
    return any(axes is not None for axes in jax.typeof(a).sharding.spec)


def _mixed(h):
    """A hash of 32 bits whose highest bit depends on all of them (MurmurHash3's last steps)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    return (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
