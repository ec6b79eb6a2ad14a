"""The INT4 codecs of Adacc 3.2 that quantize a whole tensor: two codes to a byte, and scales.

The arithmetic and the layout of codes are those of `jaxmem_kernels`; here tensors of any shape
become the rows that it takes.
"""

import abc
import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from jaxmem._model.codecs.base import Checked
from jaxmem._model.codecs.forms import (
    ChannelwiseSymmetricForm,
    GroupedAsymmetricForm,
    GroupedSymmetricForm,
    NaivePerTokenForm,
    QuantizedForm,
)
from jaxmem_kernels import (
    as_rows,
    dequantize,
    dequantize_by,
    dequantize_offset,
    fitted,
    folded,
    greatest,
    quantize,
    quantize_by,
    quantize_channelwise,
    quantize_offset,
    scale_of,
    wide_dtype,
)

# Of the codecs with scales by row: how many values of a row share bytes, half with half. A divisor
# of the row's width, since no row is then filled up; below the least, all of the row.
PACKED, LEAST_PACKED = 64, 16


class _Int4(Checked, QuantizedForm, abc.ABC):
    """What the four have in common.

    scale_sets: how many arrays of scales or offsets stand beside the codes.
    """

    scale_sets: ClassVar[int] = 1

    @abc.abstractmethod
    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the bytes of the codes of a tensor of this shape, and how many scales each set of
        them has.
        """

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        codes, scales = self.counts(tuple(shape))
        return codes + self.scale_sets * scales * jnp.dtype(self.scale).itemsize


class _Grouped(_Int4):
    """Codecs whose scales are of groups of neighbours in the flat array.

    Groups lie along the last axis where they divide it, so that codes are sharded as the tensor is.
    """

    def rows(self, shape) -> tuple[tuple[int, ...], int]:
        """Returns the tensor's shape with groups along the last axis, and the size of a group."""
        rows = folded(tuple(shape), self.group)
        return rows, fitted(rows[-1], self.group, 2)

    def encoding(self, shape) -> tuple[tuple[int, ...], dict]:
        """Returns the shape that is encoded, and the parameters of the operation that encodes."""
        rows, group = self.rows(shape)
        return rows, {
            "group": group,
            "scale": self.scale,
            "stochastic": self.stochastic,
            "seed": self.seed,
        }

    def decoding(self, shape, dtype) -> dict:
        """Returns the parameters of the operation that decodes."""
        return {"width": self.rows(shape)[0][-1], "dtype": jnp.dtype(dtype).name}

    def counts(self, shape):
        rows, group = self.rows(shape)
        groups = math.prod(rows[:-1]) * -(-rows[-1] // group)
        # A group's two halves share its bytes.
        return groups * (group // 2), groups


@dataclasses.dataclass(frozen=True)
class GroupedSymmetric(_Grouped, GroupedSymmetricForm):
    """Symmetric INT4 by groups of the flat array (Adacc 3.2): s = max|x|/8, q = clip(round(x/s),
    -8, 7), x̂ = q·s.

    group: how many values (an even number) share a scale.
    scale: dtype of the stored scale, bfloat16 or float32; it is rounded up, and values are
      quantized against the rounded one.
    stochastic: unbiased rounding, E[x̂] = x, with s = max|x|/7.
    seed: an integer from 0 to 2^32 − 1, which random bits are hashed from beside the values
      themselves; read where rounding is stochastic.

    What stochastic rounding is unbiased over: a byte's random bits are hashed from the two values
    that share it, its place in its row and the seed. So errors average out over values of different
    bits, over the places of a row, and over seeds (over all of them exactly, to 2^-16 of s). They
    do not over repeated values: the same two at the same place of their rows round alike in every
    row, layer and step, until the seed changes. A codec is part of the program and sees no step
    number; another seed is another codec, whose program is compiled anew.

    |x − x̂| ≤ s/2, or s where the code was clipped to 7 or rounding is stochastic, plus x̂'s
    rounding to `dtype`. A group of values below 2^-122 may decode to zeros; one with a value that
    is not finite, or whose scale passes the scale's dtype (float64 only), decodes to NaN. Takes
    bfloat16, float16, float32, float64.
    """

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, how = self.encoding(x.shape)
        return quantize(as_rows(x, rows), **how)

    def decode(self, codes, shape, dtype):
        return dequantize(*codes, **self.decoding(shape, dtype)).reshape(shape)


@dataclasses.dataclass(frozen=True)
class GroupedAsymmetric(_Grouped, GroupedAsymmetricForm):
    """Asymmetric INT4 by groups of the flat array (after Adacc 3.2), for values on one side of
    zero, as softmax's.

    group: how many values (an even number) share a scale and an offset.
    scale: dtype of the stored scale and offset, bfloat16 or float32.
    stochastic: unbiased rounding, by the same scale, over what `GroupedSymmetric` says.
    seed: as in `GroupedSymmetric`.

    s = (max − min)/15, o = min + 8·s, q = round((x − o)/s), x̂ = q·s + o. So codes −8 to 7 cover
    the range, and nothing is clipped. Adacc's own o = (max + min)/2 and s = (max − min)/16 would
    lower the greatest value, a softmax's peak, by a whole step.

    |x − x̂| ≤ s/2, or s where rounding is stochastic, plus x̂'s rounding to `dtype`. o is rounded to
    the nearest number of `scale`'s dtype, by d at most. s is then max((max − o)/7, (o − min)/8),
    rounded up by a share of e at most, and so was the step that o was found by. Hence
    s ≤ (1 + e)²·(max − min)/15 + (1 + e)·d/7. In bfloat16 e = 2^-7 and d = 2^-8·|o|, in float32
    e = 2^-20 and d = 2^-24·|o|, but an |o| below 2^-100 is stored as 0. A range past 1.8 times
    float32's greatest number has s ≤ (max − min)/12.

    Where min is 0, zeros decode to 0. Where |o| is far greater than max − min, a bfloat16 o costs
    accuracy: take float32. What is tiny or not finite decodes as in `GroupedSymmetric`. Takes the
    same dtypes.
    """

    scale_sets: ClassVar[int] = 2

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, how = self.encoding(x.shape)
        return quantize_offset(as_rows(x, rows), **how)

    def decode(self, codes, shape, dtype):
        return dequantize_offset(*codes, **self.decoding(shape, dtype)).reshape(shape)


class _ByRows(_Int4):
    """Codecs whose scales are of the channels or of the tokens of a tensor, taken as rows of its
    last axis. Scales are found first; values are then quantized by them.
    """

    def rows(self, shape) -> tuple[tuple[int, ...], int]:
        """Returns the tensor's shape, a row at least, and how many values of a row share bytes,
        half with half. A device that holds a part of a divided row packs its own values, where the
        part is a multiple of that.
        """
        rows = tuple(shape) or (1,)
        # Else one group holds the row: `fitted` rounds its width up to an even number.
        common = math.gcd(rows[-1], PACKED)
        return rows, common if common >= LEAST_PACKED else fitted(rows[-1], 2 * max(rows[-1], 1), 2)

    @abc.abstractmethod
    def encoded(self, x, how: dict) -> tuple:
        """Returns the codes of `x`, rows of values, and their scales. `how` has the parameters of
        the operation that encodes, all but the scales' dtype.
        """

    @abc.abstractmethod
    def spread(self, scales):
        """Returns the scales in a shape that broadcasts to the tensor's."""

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, group = self.rows(x.shape)
        how = {"group": group, "stochastic": self.stochastic, "seed": self.seed}
        return self.encoded(x.reshape(rows), how)

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
        """Returns how many scales a tensor of shape `rows` has."""


@dataclasses.dataclass(frozen=True)
class ChannelwiseSymmetric(_ByRows, ChannelwiseSymmetricForm):
    """Symmetric INT4 with one scale for each channel (index of the last axis) over all tokens
    (Adacc 3.2: Q, K, V).

    scale: dtype of the stored scales, bfloat16 or float32; they are rounded up.
    stochastic, seed: unbiased rounding, over what `GroupedSymmetric` says.

    So an outlier channel of Q, K or V has a scale of its own and spoils no other, without being
    moved in memory. There is one scale a channel, however many tokens. The tensor is read twice,
    since a scale is known after the last token; a TPU reads it once where all values of some
    channels fit in a core's memory. A value that is not finite makes its whole channel NaN.
    Bounds and dtypes are those of `GroupedSymmetric`.
    """

    def encoded(self, x, how):
        return quantize_channelwise(x, scale=self.scale, **how)

    def spread(self, scales):
        return scales

    def scale_count(self, rows):
        return rows[-1]


@dataclasses.dataclass(frozen=True)
class NaivePerToken(_ByRows, NaivePerTokenForm):
    """Symmetric INT4 with one scale for each token (all of the last axis): Adacc's baseline, which
    it shows to fail.

    scale: dtype of the stored scales, bfloat16 or float32; they are rounded up.

    One outlier channel sets the scale of every token. Bounds and dtypes are those of
    `GroupedSymmetric`.
    """

    def encoded(self, x, how):
        # Codes are made by the scales that are stored, rounded up, and not by the exact ones.
        most = greatest(x.astype(wide_dtype(x.dtype)), -1)
        scales = scale_of(most, self.scale, self.stochastic)
        return quantize_by(x, self.spread(scales), **how), scales

    def spread(self, scales):
        return scales[..., None]

    def scale_count(self, rows):
        return math.prod(rows[:-1])
