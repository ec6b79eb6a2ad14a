"""The codec with one bit per value, for dropout masks and other two-valued tensors (Adacc §3.2)."""

import dataclasses
import math
from typing import ClassVar

import jaxmem_kernels as kernels
from jaxmem._model.codecs.base import FLOATS, NamedCodec, dtype_of

GROUP = 256  # values that share 32 bytes
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


@dataclasses.dataclass(frozen=True)
class BitMask(NamedCodec):
    """One bit per value, for bool and for tensors of at most two values (Adacc §3.2).

    The codec has no fields. It is lossless for these tensors, up to the sign of zero.

    The codec supports bool, and tensors of two values, such as {0, 1}, {0, 1/0.9} or {-inf, 0}, in
    bfloat16, float16, float32, float64, and signed and unsigned integers of 8 to 64 bits. The two
    values are stored in addition to the bits. If a floating-point tensor has more than two values,
    all values but the least decode to NaN. If an integer tensor has more than two values, all
    values but the least decode to the greatest value. Keep such a tensor.
    """

    name: ClassVar[str] = "bit_mask"
    lossless: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("bool", *INTEGERS, *FLOATS)
    two_valued: ClassVar[bool] = True

    def encode(self, x):
        import jax.numpy as jnp

        self.check(x.shape, x.dtype)
        if x.dtype == jnp.bool_:
            return (_pack(x, jnp.zeros((), bool)),)
        if not x.size:  # no least and no greatest
            return _pack(x, jnp.zeros((), x.dtype)), jnp.zeros(2, x.dtype)
        low, high = x.min(), x.max()
        if jnp.issubdtype(x.dtype, jnp.floating):
            # A third value, or a NaN, must not decode to a finite one.
            high = jnp.where(((x == low) | (x == high)).all(), high, jnp.nan)
        return _pack(x, low), jnp.stack([low, high])

    def decode(self, codes, shape, dtype):
        import jax.numpy as jnp

        # The codes of a bool tensor are bits alone, without the two values.
        bits, *values = codes
        zero, one = values[0] if values else (jnp.zeros((), bool), jnp.ones((), bool))
        width = kernels.folded(tuple(shape), GROUP)[-1]
        return kernels.unpack_bits(bits, zero, one, width=width).reshape(shape)

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        rows = kernels.folded(tuple(shape), GROUP)
        group = kernels.fitted(rows[-1], GROUP, 8)
        codes = math.prod(rows[:-1]) * -(-rows[-1] // group) * (group // 8)
        values = 0 if dtype_of(dtype).name == "bool" else 2 * dtype_of(dtype).itemsize
        return codes + values


def _pack(x, zero):
    """Packs `x` != `zero`, in groups along the last axis if the groups divide the axis."""
    rows = kernels.folded(x.shape, GROUP)
    group = kernels.fitted(rows[-1], GROUP, 8)
    return kernels.pack_bits(kernels.as_rows(x, rows), zero, group=group)
