"""One bit a value, for dropout masks and other tensors of two values (Adacc 3.2)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxmem._codecs_base import FLOATS, TextForm
from jaxmem_kernels import from_parts, pack_bits, part_shape, to_parts, unpack_bits

GROUP = 256
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


@dataclasses.dataclass(frozen=True)
class BitMask(TextForm):
    """A bit a value. Lossless, up to the sign of zero, for bool and for tensors that hold at most two values.

    Takes bool; bfloat16, float16, float32, float64 and (u)int8 to 64 of two values, such as {0, 1}, {0, 1/0.9} or
    {-inf, 0}: the two are stored beside the bits. Where a floating tensor holds more, all but the least value decode to
    NaN; where an integer one does, all but the least decode to the greatest: keep such a tensor.
    """

    name: ClassVar[str] = "bit_mask"
    takes: ClassVar[tuple[str, ...]] = ("bool", *INTEGERS, *FLOATS)

    def encode(self, x):
        self.check(x.shape, x.dtype)
        if x.dtype == jnp.bool_:
            return (_pack(x),)
        if not x.size:
            return _pack(x != 0), jnp.zeros(2, x.dtype)
        low, high = x.min(), x.max()
        bits = x != low
        if jnp.issubdtype(x.dtype, jnp.floating):
            high = jnp.where((~bits | (x == high)).all(), high, jnp.nan)
        return _pack(bits), jnp.stack([low, high])

    def decode(self, codes, shape, dtype):
        bits = from_parts(unpack_bits(codes[0]), shape)
        return bits if len(codes) == 1 else jnp.where(bits, codes[1][1], codes[1][0])

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        rows, _, width = part_shape(shape, GROUP, 8)
        return rows * width + (0 if jnp.dtype(dtype) == jnp.bool_ else 2 * jnp.dtype(dtype).itemsize)


def _pack(bits):
    return pack_bits(to_parts(bits, GROUP, 8))
