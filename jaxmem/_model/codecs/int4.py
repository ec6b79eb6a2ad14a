"""The INT4 codecs of Adacc 3.2 that quantize a whole tensor: two codes to a byte, and scales.

`jaxmem_kernels` quantizes rows, and defines the layout of codes. This file reshapes tensors of any
shape to rows.
"""

import abc
import dataclasses
import math
from typing import ClassVar

import jaxmem_kernels as kernels
from jaxmem._model.codecs.base import NamedCodec, check_flag, check_integer, dtype_of, scale_name

# `_ByRows` packs PACKED values of a row at once, the first half with the second half, or the
# largest number of values that divides both PACKED and the width of the row, so that no row is
# padded. If that number is below LEAST_PACKED, `_ByRows` packs the whole row at once.
PACKED, LEAST_PACKED = 64, 16


def check_quantizer(codec) -> None:
    """Checks a codec's fields `group`, `scale`, `stochastic` and `seed`, and stores the scale by
    its name.
    """
    # `scale` may be a dtype; a frozen dataclass allows no assignment.
    object.__setattr__(codec, "scale", scale_name(codec.name, codec.scale))
    check_integer(codec.name, "group", codec.group, 2, multiple=2)
    check_flag(codec.name, "stochastic", codec.stochastic)
    check_integer(codec.name, "seed", codec.seed, 0, most=2**32 - 1)


class _Int4(NamedCodec, abc.ABC):
    """Codecs that quantize a whole tensor, with the checks of their fields. A codec without one of
    the fields has the value that is declared here, and its text omits the field.

    scale_sets: number of arrays of scales or offsets that are stored with the codes.
    """

    scale_sets: ClassVar[int] = 1
    group: int = 2
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self):
        check_quantizer(self)

    @abc.abstractmethod
    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the number of bytes of codes for a tensor of this shape, and the number of scales
        in each array of scales.
        """

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        codes, scales = self.counts(tuple(shape))
        return codes + self.scale_sets * scales * dtype_of(self.scale).itemsize


class _Grouped(_Int4):
    """Codecs with one scale for each group of neighbours in the flat array.

    Groups run along the last axis if the group size divides the axis. Codes are then sharded as the
    tensor is.
    """

    def rows(self, shape) -> tuple[tuple[int, ...], int]:
        """Returns the tensor's shape with groups along the last axis, and the size of a group."""
        rows = kernels.folded(tuple(shape), self.group)
        return rows, kernels.fitted(rows[-1], self.group, 2)

    def encoding(self, shape) -> tuple[tuple[int, ...], dict]:
        """Returns the shape of the rows to encode, and the parameters of the encoding operation."""
        rows, group = self.rows(shape)
        how = {"group": group, "stochastic": self.stochastic, "seed": self.seed}
        return rows, how | {"scale": self.scale}

    def decoding(self, shape, dtype) -> dict:
        """Returns the parameters of the decoding operation."""
        return {"width": self.rows(shape)[0][-1], "dtype": dtype_of(dtype).name}

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, how = self.encoding(x.shape)
        quantize = kernels.quantize if self.scale_sets == 1 else kernels.quantize_offset
        return quantize(kernels.as_rows(x, rows), **how)

    def decode(self, codes, shape, dtype):
        dequantize = kernels.dequantize if self.scale_sets == 1 else kernels.dequantize_offset
        return dequantize(*codes, **self.decoding(shape, dtype)).reshape(shape)

    def counts(self, shape):
        rows, group = self.rows(shape)
        groups = math.prod(rows[:-1]) * -(-rows[-1] // group)
        # Each byte holds one code of a group's first half and one code of its second half.
        return groups * (group // 2), groups


@dataclasses.dataclass(frozen=True)
class GroupedSymmetric(_Grouped):
    """Symmetric INT4 with one scale per group of values (Adacc §3.2).

    The scale of a group is s = max|x|/8, a code is q = clip(round(x/s), −8, 7), and a decoded value
    is x̂ = q·s. A group is a range of the flat array.

    group: number of values that share a scale, an even number.
    scale: dtype of the stored scales, bfloat16 or float32. Scales are rounded up, and values are
      quantized by the rounded scale.
    stochastic: whether rounding is stochastic and unbiased, E[x̂] = x. The scale is then
      s = max|x|/7.
    seed: an integer from 0 to 2^32 − 1, which selects the random bits of stochastic rounding.

    The error is |x − x̂| ≤ s/2, or s if the code was clipped to 7 or rounding is stochastic, plus
    the rounding of x̂ to the dtype of x. A group of values below 2^-122 may decode to zeros. A
    group decodes to NaN if a value is not finite, or if the scale exceeds the range of its dtype
    (float64 only). The codec supports bfloat16, float16, float32 and float64.

    The random bits of a byte are a hash of the two values that share the byte, of the byte's
    position in its row, and of the seed. Stochastic rounding is therefore unbiased over values with
    different bits, over the positions of a row, and over seeds. Over all seeds, rounding is exactly
    unbiased, to 2^-16 of s. Rounding is not unbiased over repeated values: two equal pairs at the
    same position of their rows are rounded alike, in every row, layer and step. The codec is a part
    of the program and does not know the number of the step. A codec with another seed rounds these
    pairs differently, and is compiled again.
    """

    name: ClassVar[str] = "grouped_symmetric"
    group: int = 64
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class GroupedAsymmetric(_Grouped):
    """Asymmetric INT4 with one scale and one offset per group of values (after Adacc §3.2).

    The codec suits values on one side of zero, such as the values of a softmax. A group is a range
    of the flat array.

    group: number of values that share a scale and an offset, an even number.
    scale: dtype of the stored scales and offsets, bfloat16 or float32.
    stochastic: whether rounding is stochastic and unbiased, with the same scale. `GroupedSymmetric`
      describes the random bits.
    seed: an integer from 0 to 2^32 − 1, which selects the random bits of stochastic rounding.

    The scale is s = (max − min)/15, the offset is o = min + 8·s, a code is q = round((x − o)/s),
    and a decoded value is x̂ = q·s + o. The codes −8 to 7 cover the range of the group, and no
    value is clipped. Adacc's own o = (max + min)/2 and s = (max − min)/16 would decode the largest
    value, the peak of a softmax, one whole step too low.

    The error is |x − x̂| ≤ s/2, or s if rounding is stochastic, plus the rounding of x̂ to the
    dtype of x. o is rounded to the nearest number of the dtype `scale`, by at most d. The stored s
    is max((max − o)/7, (o − min)/8), rounded up by at most the share e. The step from which o is
    computed is rounded up in the same way. Hence s ≤ (1 + e)²·(max − min)/15 + (1 + e)·d/7. For
    bfloat16, e = 2^-7 and d = 2^-8·|o|. For float32, e = 2^-20 and d = 2^-24·|o|. An |o| below
    2^-100 is stored as 0. A range of more than 1.8 times the largest float32 number has
    s ≤ (max − min)/12.

    If min is 0, zeros decode to 0. If |o| is much larger than max − min, an offset in bfloat16
    costs accuracy: use float32. Tiny values, and values that are not finite, decode as with
    `GroupedSymmetric`. The codec supports bfloat16, float16, float32 and float64.
    """

    name: ClassVar[str] = "grouped_asymmetric"
    scale_sets: ClassVar[int] = 2
    group: int = 64
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0


class _ByRows(_Int4):
    """Codecs with one scale for each channel or each token. A row is the tensor's last axis. The
    scales are computed before the values are quantized.
    """

    def rows(self, shape) -> tuple[tuple[int, ...], int]:
        """Returns the tensor's shape with at least one axis, and the number of values of a row that
        are packed at once, the first half with the second half. If a device's part of a divided row
        is a multiple of this number, the device packs its own values.
        """
        rows = tuple(shape) or (1,)
        if (common := math.gcd(rows[-1], PACKED)) >= LEAST_PACKED:
            return rows, common
        # One group holds the row: `fitted` rounds the row's width up to an even number.
        return rows, kernels.fitted(rows[-1], 2 * max(rows[-1], 1), 2)

    @abc.abstractmethod
    def encoded(self, x, how: dict) -> tuple:
        """Returns the codes and the scales of `x`, rows of values. `how` has the parameters of the
        encoding operation, except the dtype of the scales.
        """

    @abc.abstractmethod
    def spread(self, scales):
        """Returns the scales in a shape that broadcasts to the tensor's shape."""

    def encode(self, x):
        self.check(x.shape, x.dtype)
        rows, group = self.rows(x.shape)
        how = {"group": group, "stochastic": self.stochastic, "seed": self.seed}
        return self.encoded(x.reshape(rows), how)

    def decode(self, codes, shape, dtype):
        packed, scales = codes
        width = self.rows(shape)[0][-1]
        return kernels.dequantize_by(
            packed, self.spread(scales), width=width, dtype=dtype_of(dtype).name
        ).reshape(shape)

    def counts(self, shape):
        rows, group = self.rows(shape)
        codes = math.prod(rows[:-1]) * -(-rows[-1] // group) * (group // 2)
        return codes, self.scale_count(rows)

    @abc.abstractmethod
    def scale_count(self, rows) -> int:
        """Returns the number of scales of a tensor of shape `rows`."""


@dataclasses.dataclass(frozen=True)
class ChannelwiseSymmetric(_ByRows):
    """Symmetric INT4 with one scale per channel, over all tokens (Adacc §3.2: Q, K and V).

    A channel is an index of the last axis. The number of scales does not depend on the number of
    tokens.

    scale: dtype of the stored scales, bfloat16 or float32. Scales are rounded up.
    stochastic, seed: stochastic rounding, as for `GroupedSymmetric`.

    An outlier channel of Q, K or V has a scale of its own, and does not affect the accuracy of
    other channels. Outlier channels are not moved in memory. The tensor is read twice, because a
    scale is known only after the last token. A TPU reads the tensor once if a core's memory holds
    all values of some channels. A value that is not finite makes its whole channel NaN. The error
    bounds of `GroupedSymmetric` apply, and the same dtypes are supported.
    """

    name: ClassVar[str] = "channelwise_symmetric"
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0

    def encoded(self, x, how):
        return kernels.quantize_channelwise(x, scale=self.scale, **how)

    def spread(self, scales):
        return scales

    def scale_count(self, rows):
        return rows[-1]


@dataclasses.dataclass(frozen=True)
class NaivePerToken(_ByRows):
    """Symmetric INT4 with one scale per token: a baseline of Adacc that Adacc shows to fail.

    A token is all values along the last axis.

    scale: dtype of the stored scales, bfloat16 or float32. Scales are rounded up.

    One outlier channel determines the scale of every token. The error bounds of `GroupedSymmetric`
    apply, and the same dtypes are supported.
    """

    name: ClassVar[str] = "naive_per_token"
    scale: str = "bfloat16"

    def encoded(self, x, how):
        # Values are quantized by the stored scales, which are rounded up.
        most = kernels.greatest(x.astype(kernels.wide_dtype(x.dtype)), -1)
        scales = kernels.scale_of(most, self.scale, self.stochastic)
        return kernels.quantize_by(x, self.spread(scales), **how), scales

    def spread(self, scales):
        return scales[..., None]

    def scale_count(self, rows):
        return math.prod(rows[:-1])
