"""The INT4 codecs of Adacc 3.2 that quantize a whole tensor: two codes to a byte, and scales."""

import abc
import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from jaxmem._codecs.base import Checked
from jaxmem._codecs.forms import (
    ChannelwiseSymmetricForm,
    GroupedAsymmetricForm,
    GroupedSymmetricForm,
    NaivePerTokenForm,
    QuantizedForm,
)
from jaxmem_kernels import (
    dequantize,
    dequantize_by,
    dequantize_offset,
    fitted,
    folded,
    greatest,
    quantize,
    quantize_by,
    quantize_offset,
    scale_of,
    wide_dtype,
)

PACKED, LEAST_PACKED = 64, 16


class _Int4(Checked, QuantizedForm, abc.ABC):
    """What the four have in common."""

    scale_sets: ClassVar[int] = 1  # arrays of that many scales or offsets

    @abc.abstractmethod
    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of codes, and the number of scales in each set of them, for a tensor of this
        shape.
        """

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        codes, scales = self.counts(tuple(shape))
        return codes + self.scale_sets * scales * jnp.dtype(self.scale).itemsize


class _Grouped(_Int4):
    """In groups of the flat array: of its last axis where groups divide it, so that codes are
    sharded as the tensor is.
    """

    def rows(self, shape) -> tuple[tuple[int, ...], int]:
        """The tensor's shape with its groups along the last axis, and the size of one."""
        rows = folded(tuple(shape), self.group)
        return rows, fitted(rows[-1], self.group, 2)

    def encoding(self, shape) -> tuple[tuple[int, ...], dict]:
        """The shape that is encoded, and how."""
        rows, group = self.rows(shape)
        return rows, {"group": group, "scale": self.scale, "stochastic": self.stochastic}

    def decoding(self, shape, dtype) -> dict:
        return {"width": self.rows(shape)[0][-1], "dtype": jnp.dtype(dtype).name}

    def counts(self, shape):
        rows, group = self.rows(shape)
        groups = math.prod(rows[:-1]) * -(-rows[-1] // group)
        return groups * (group // 2), groups


@dataclasses.dataclass(frozen=True)
class GroupedSymmetric(_Grouped, GroupedSymmetricForm):
    """Symmetric INT4 by groups of the flat array (Adacc 3.2): s = max|x|/8, q = clip(round(x/s),
    -8, 7), x̂ = q·s.

    `group`: values (even) that share a scale. `scale`: dtype of the stored scale, bfloat16 or
    float32; it is rounded up, and values are quantized against the rounded one. `stochastic`:
    unbiased rounding, E[x̂] = x, with s = max|x|/7; its random bits are hashed from the group
    itself.
    |x − x̂| ≤ s/2, or s where the code was clipped to 7 or rounding is stochastic, plus x̂'s
    rounding to `dtype`. A group of values below 2^-122 may decode to zeros; one with a value that
    is not finite, or whose scale passes the scale's dtype (float64 only), decodes to NaN. Takes
    bfloat16, float16, float32, float64.
    """

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, how = self.encoding(x.shape)
        return quantize(x.reshape(rows), **how)

    def decode(self, codes, shape, dtype):
        return dequantize(*codes, **self.decoding(shape, dtype)).reshape(shape)


@dataclasses.dataclass(frozen=True)
class GroupedAsymmetric(_Grouped, GroupedAsymmetricForm):
    """Asymmetric INT4 by groups of the flat array (Adacc 3.2), for values on one side of zero, as
    softmax's.

    o = (max + min)/2, s = (max − min)/16, q = clip(round((x − o)/s), −8, 7), x̂ = q·s + o. o is
    stored in `scale`'s dtype, and s is then max|x − o|/8, rounded up, so that the bounds of
    `GroupedSymmetric` hold with this s; fields and dtypes are the same. Where |o| is far greater
    than max − min, a bfloat16 o costs accuracy: take float32.
    """

    scale_sets: ClassVar[int] = 2

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, how = self.encoding(x.shape)
        return quantize_offset(x.reshape(rows), **how)

    def decode(self, codes, shape, dtype):
        return dequantize_offset(*codes, **self.decoding(shape, dtype)).reshape(shape)


class _ByRows(_Int4):
    """With scales for the tensor as rows of its last axis, whose neighbouring halves share
    bytes.
    """

    def rows(self, shape) -> tuple[tuple[int, ...], int]:
        """The tensor's shape, a row at least, and how many values' halves share bytes: a shard's
        own, where one is divided.
        """
        rows = tuple(shape) or (1,)
        common = math.gcd(rows[-1], PACKED)
        return rows, common if common >= LEAST_PACKED else fitted(rows[-1], 2 * max(rows[-1], 1), 2)

    @abc.abstractmethod
    def greatest(self, x):
        """max|x| over the values that share a scale; its shape is that of the scales."""

    @abc.abstractmethod
    def spread(self, scales):
        """The scales, as they broadcast to the tensor."""

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, group = self.rows(x.shape)
        x = x.reshape(rows)
        scales = scale_of(self.greatest(x.astype(wide_dtype(x.dtype))), self.scale, self.stochastic)
        return quantize_by(x, self.spread(scales), group=group, stochastic=self.stochastic), scales

    def decode(self, codes, shape, dtype):
        packed, scales = codes
        width = self.rows(shape)[0][-1]
        return dequantize_by(
            packed, self.spread(scales), width=width, dtype=jnp.dtype(dtype).name
        ).reshape(shape)

    def counts(self, shape):
        rows, group = self.rows(shape)
        codes = math.prod(rows[:-1]) * -(-rows[-1] // group) * (group // 2)
        return codes, self.scale_count(rows)

    @abc.abstractmethod
    def scale_count(self, rows) -> int:
        """How many scales there are."""


@dataclasses.dataclass(frozen=True)
class ChannelwiseSymmetric(_ByRows, ChannelwiseSymmetricForm):
    """Symmetric INT4 with one scale for each channel (index of the last axis) over all tokens
    (Adacc 3.2: Q, K, V).

    An outlier channel of Q, K or V so has a scale of its own and spoils no other, without being
    moved in memory; there is one scale a channel, however many tokens. The tensor is read twice: a
    scale is known after the last token. A value that is not finite makes its whole channel NaN.
    Bounds and dtypes as for `GroupedSymmetric`.
    """

    def greatest(self, x):
        return greatest(x, tuple(range(x.ndim - 1)))

    def spread(self, scales):
        return scales

    def scale_count(self, rows):
        return rows[-1]


@dataclasses.dataclass(frozen=True)
class NaivePerToken(_ByRows, NaivePerTokenForm):
    """Symmetric INT4 with one scale for each token (all of the last axis): Adacc's baseline, which
    it shows to fail.

    One outlier channel sets the scale of every token. Bounds and dtypes as for `GroupedSymmetric`.
    """

    def greatest(self, x):
        return greatest(x, -1)

    def spread(self, scales):
        return scales[..., None]

    def scale_count(self, rows):
        return math.prod(rows[:-1])
