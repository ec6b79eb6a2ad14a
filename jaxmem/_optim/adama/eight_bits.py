"""Moments in 8 bits: one byte a value, and one float32 scale for each row of the last axis.

A code is the upper bits of a small floating-point number, so that coding is a few integer
operations: with y the magnitude in units of the row's scale, the number is y + c, and the code is
the upper bits of y + c minus the upper bits of c. Neighbouring codes differ by 1/16 to 1/8 of
y + c, where c is 1.7e-5 for signed values, and 2.6e-10 for second moments, which are not negative.
So codes are dense where values are small. A code of equal steps is the alternative: it rounds the
many small second moments of a row to zero or to one value, and a GPT then ends at a higher loss. A
logarithmic code is as good as this one, and needs a logarithm and an exponential for each value.

The range of first moments is the range of the roots of second moments. With fewer octaves and one
more digit, the rounding error of a first moment far below its row's largest was many times the root
of its second moment, and the loss of one of three GPTs jumped.

Blocks of 256 values of the last axis were the first choice. XLA:CPU divides for the index of the
block's scale, value by value. Rows may be long, since codes are relative.

Rounding is stochastic and unbiased: the expectation of a stored value is the value. Second moments
with b2 = 0.999 change by 0.1 % a step, which is less than half a step of any 8-bit code. Rounded to
nearest, they would never change. The random bits are a hash of the position and of the microbatch's
number, as the signs of the row ratio are. They need no key in the state. A second moment above zero
is never stored as zero, since an update divides by its root.
"""

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem._model.states.layout import empty, filling
from jaxmem._model.states.store import fetch
from jaxmem._model.tags.operations import wide
from jaxmem._optim.adama.rows import mixed
from jaxmem.errors import OptimizerError

_MANTISSA = 3  # bits
_CUT = 23 - _MANTISSA  # the lower bits of a float32 that a code does not have


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class EightBits:
    """An array in 8 bits a value.

    codes: uint8 of the array's shape for values that are not negative, else int8.
    scales: float32 (*shape[:-1], 1), the unit of each row. The highest code is the row's largest
      magnitude, which is 1 − c units.
    dtype: the dtype of the decoded array, float32 at least: in bfloat16, the change of a second
      moment in one step would be rounded away.
    """

    codes: Any
    scales: Any
    dtype: str

    @staticmethod
    def of(x, signed: bool, noise=None) -> "EightBits":
        """Codes an array of at least one axis.

        x: the array, floating-point.
        signed: whether values may be negative.
        noise: uint32 of the array's shape, the random bits of stochastic rounding. None rounds
          down, which is exact for zeros.

        If y is a magnitude divided by its row's largest, the error is less than (y + 1.8e-5) / 8 of
        the largest if signed, and (y + 2.7e-10) / 8 if not.
        """
        values = x.astype(jnp.float32)
        magnitude = jnp.abs(values)
        # A row with a NaN is NaN, as XLA's maximum is. XLA:CPU vectorizes this maximum; the maximum
        # of the bits, as integers, took ten times as long there.
        largest = jnp.max(magnitude, -1, keepdims=True, initial=0)
        scales = largest / (1 - _least(signed))
        y = magnitude / jnp.where(scales > 0, scales, 1)
        bits = jax.lax.bitcast_convert_type(jnp.minimum(y + _least(signed), 1), jnp.uint32)
        if noise is not None:
            # Within an octave codes have equal distances: random bits below the cut carry into the
            # code with the probability of the part that is cut off.
            bits = bits + (noise & jnp.uint32((1 << _CUT) - 1))
        code = (bits >> _CUT).astype(jnp.int32) - _first(signed)
        if signed:
            code = jnp.where(values < 0, -code, code).astype(jnp.int8)
        else:
            code = jnp.maximum(code, (values > 0).astype(jnp.int32)).astype(jnp.uint8)
        return EightBits(code, scales, wide(x.dtype).name)

    @property
    def decoded(self):
        """The array."""
        signed = self.codes.dtype == jnp.int8
        code = self.codes.astype(jnp.int32)
        bits = (jnp.abs(code) + _first(signed)).astype(jnp.uint32) << _CUT
        y = jax.lax.bitcast_convert_type(bits, jnp.float32) - _least(signed)
        return (jnp.where(code < 0, -y, y) * self.scales).astype(self.dtype)

    def replaced(self, x, noise) -> "EightBits":
        """Codes another array in the form of this one."""
        return EightBits.of(x, self.codes.dtype == jnp.int8, noise)


def _first(signed: bool) -> int:
    """The upper bits of the number of code 0. The number of the highest code is 1."""
    return (127 << _MANTISSA) - (127 if signed else 255)


def _least(signed: bool) -> np.float32:
    """The number of code 0."""
    return np.uint32(_first(signed) << _CUT).view(np.float32)


def noise_of(shape: tuple[int, ...], step, number: int):
    """Returns random bits, uint32 of this shape: a hash of each position, of the step, and of the
    array's number.
    """
    salt = jnp.uint32(number % 2**32)
    seed = mixed(jnp.asarray(step).astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + salt)
    position = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    once = mixed(position * jnp.uint32(0x85EBCA77) + seed)
    return once ^ once >> 16


def is_coded(a) -> bool:
    return isinstance(a, EightBits)


def is_quantized(state) -> bool:
    """Whether an optimizer's state has an array in 8 bits."""
    return any(map(is_coded, jax.tree.leaves(state, is_leaf=is_coded)))


def coded(tree, signed: bool):
    """Codes a tree's floating-point arrays of at least one axis."""
    can = lambda a: jnp.ndim(a) > 0 and jnp.issubdtype(jnp.result_type(a), jnp.floating)
    return jax.tree.map(lambda a: EightBits.of(a, signed) if can(a) else a, tree)


def decoded(tree):
    """Returns a tree with its coded arrays decoded."""
    return jax.tree.map(lambda a: a.decoded if is_coded(a) else a, tree, is_leaf=is_coded)


def recoded(old, new, number):
    """Codes the arrays of the tree `new` that are coded in `old`, a tree of the same structure.

    number: int32, from which the random bits of the rounding are made.
    """
    leaves, structure = jax.tree.flatten(old, is_leaf=is_coded)
    pairs = enumerate(zip(leaves, structure.flatten_up_to(new), strict=True))
    code = lambda i, a, b: a.replaced(b, noise_of(b.shape, number, i)) if is_coded(a) else b
    return structure.unflatten([code(i, a, b) for i, (a, b) in pairs])


def recoded_as(shape, a, number: int, stacked: bool, kept: Collection[int]):
    """Codes an array in the form of `shape`, one layer at a time, and deletes the array. The result
    is stored in the memory of the array. An array without a code remains.

    shape: the shapes of an `EightBits`, or the shape of an array without a code.
    a: the array, or its shape, which becomes the shapes of an `EightBits`.
    number: the array's number, from which the random bits of the rounding are made.
    stacked: whether the first axis is an axis of layers.
    kept: the ids of arrays that are not deleted.
    """
    if not is_coded(shape):
        return a
    there = getattr(a, "sharding", None)
    like = lambda b: jax.ShapeDtypeStruct(b.shape, b.dtype, sharding=there)
    shapes = jax.tree.map(like, shape)
    if isinstance(a, jax.ShapeDtypeStruct):
        return shapes
    code = lambda a, i: shape.replaced(a, noise_of(a.shape, i, number))
    if stacked:
        layers = lambda made, a: filling(lambda i: code(fetch(a, i), i), a.shape[0])(made)
        made = jax.jit(layers, donate_argnums=0)(jax.tree.map(empty, shapes), a)
    else:
        made = jax.jit(code)(a, 0)
    if id(a) not in kept:
        jax.block_until_ready(made)
        a.delete()
    return made


def scaled(tree, by):
    """Multiplies the arrays of a tree by a factor of at least 0. Codes remain."""
    one = lambda a: dataclasses.replace(a, scales=by * a.scales) if is_coded(a) else by * a
    return jax.tree.map(one, tree, is_leaf=is_coded)


def shapes(tree):
    """Returns the shapes and dtypes of a tree's decoded arrays."""
    one = lambda a: jax.ShapeDtypeStruct(a.codes.shape, a.dtype) if is_coded(a) else a
    return jax.tree.map(one, tree, is_leaf=is_coded)


def _rounded(updates, params, number):
    """Changes the updates of bfloat16 parameters so that the updated parameters are bfloat16
    numbers, rounded stochastically. Other updates remain.
    """

    def one(i, update, a):
        if jnp.result_type(a) != jnp.bfloat16:
            return update
        wide = jnp.asarray(a).astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(wide + update.astype(jnp.float32), jnp.uint32)
        bits = bits + (noise_of(bits.shape, number, -1 - i) & jnp.uint32(0xFFFF))
        # The upper half of a float32 is a bfloat16.
        new = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return new - wide

    leaves, structure = jax.tree.flatten(updates)
    pairs = enumerate(zip(leaves, structure.flatten_up_to(params), strict=True))
    return structure.unflatten([one(i, update, a) for i, (update, a) in pairs])


class QuantizedState(NamedTuple):
    """The state of `quantized`.

    count: number of updates, int32, from which the random bits of the rounding are made.
    inner: the state of the wrapped transformation, with arrays as `EightBits`.
    """

    count: Any
    inner: Any


def quantized(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns an optax transformation that stores the state of `tx` in 8 bits a value.

    Adam's moments take 2 bytes a parameter in place of 8, and 8 bytes a row. Each update decodes
    the moments, calls `tx`, and codes the new moments. In `jaxmem.released_step`, the decoded
    moments of one layer exist at once. For AdamA, use `jaxmem.adama(..., moments="int8")`.

    tx: a transformation whose state is moments: `optax.adam`, `optax.adamw`, `optax.lion`, or
      another with trees like the parameters. Second moments are recognised by optax's name `nu`.

    A value x is stored relative to the largest magnitude s of its row along the last axis. Rounding
    is stochastic and unbiased. The error is less than (|x| + 1.8e-5 s) / 8 for first moments, and
    (x + 2.7e-10 s) / 8 for second moments. Arrays without an axis, integers and complex numbers are
    stored as they are.

    If `update` receives the parameters, parameters in bfloat16 are rounded stochastically too: the
    updates are float32, and `optax.apply_updates` adds them exactly. So bfloat16 parameters need no
    float32 copy. Transformations after `quantized` in a chain would undo this.

    A transformation that `quantized` returned is returned as it is.

    Raises OptimizerError if `tx` is no optax transformation, or is AdamA.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise OptimizerError(
            f"quantized: `tx` is {type(tx).__name__}; expected an optax transformation, such as"
            " optax.adamw(1e-3)"
        )
    if hasattr(tx, "rule"):
        raise OptimizerError(
            "quantized: `tx` is AdamA; expected jaxmem.adama(..., moments='int8'), or an optax"
            " transformation: a released step folds microbatches into the moments that it stores"
        )
    if getattr(tx.update, "func", None) is _update_in_8_bits:
        return optax.with_extra_args_support(tx)
    inner = optax.with_extra_args_support(tx)

    def init(params):
        # Optax's second moments, which are not negative, are called `nu`.
        signed = lambda path: not any(getattr(key, "name", "") == "nu" for key in path)
        code = lambda path, a: coded(a, signed(path))
        state = jax.tree_util.tree_map_with_path(code, inner.init(params))
        return QuantizedState(jnp.zeros((), jnp.int32), state)

    update: Any = functools.partial(_update_in_8_bits, inner)
    return optax.GradientTransformationExtraArgs(init, update)


def _update_in_8_bits(
    inner: optax.GradientTransformationExtraArgs,
    updates,
    state: QuantizedState,
    params=None,
    **extra,
) -> tuple[Any, QuantizedState]:
    """`update` of the transformation that `quantized` returns.

    inner: the wrapped transformation.
    """
    count = optax.safe_increment(state.count)
    updates, new = inner.update(updates, decoded(state.inner), params, **extra)
    if params is not None:
        updates = _rounded(updates, params, state.count)
    return updates, QuantizedState(count, recoded(state.inner, new, state.count))
