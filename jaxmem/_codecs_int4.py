"""The INT4 codecs of Adacc 3.2 that quantize a whole tensor: two codes to a byte, and scales."""

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxmem._codecs_base import TextForm, check_flag, check_integer, scale_name
from jaxmem_kernels import (
    NEAREST,
    STOCHASTIC,
    dequantize,
    dequantize_offset,
    from_parts,
    from_rows,
    part_shape,
    quantize,
    quantize_offset,
    row_shape,
    to_parts,
    to_rows,
)


class _Int4(TextForm, abc.ABC):
    """What the four have in common."""

    scale_sets: ClassVar[int] = 1  # arrays of that many scales or offsets
    group: int = 2
    scale: str
    stochastic: bool = False

    def __post_init__(self):
        object.__setattr__(self, "scale", scale_name(self.name, self.scale))
        check_integer(self.name, "group", self.group, 2, multiple=2)
        check_flag(self.name, "stochastic", self.stochastic)

    @property
    def _rounding(self):
        return STOCHASTIC if self.stochastic else NEAREST

    @abc.abstractmethod
    def layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of codes, and the number of scales in each set of them, for a tensor of this shape."""

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        codes, scales = self.layout(tuple(shape))
        return codes + self.scale_sets * scales * jnp.dtype(self.scale).itemsize


@dataclasses.dataclass(frozen=True)
class GroupedSymmetric(_Int4):
    """Symmetric INT4 by groups of the flat array (Adacc 3.2): s = max|x|/8, q = clip(round(x/s), -8, 7), x̂ = q·s.

    `group`: values (even) that share a scale. `scale`: dtype of the stored scale, bfloat16 or float32; it is rounded
    up, and values are quantized against the rounded one. `stochastic`: unbiased rounding, E[x̂] = x, with s = max|x|/7;
    its random bits are hashed from the group itself.
    |x − x̂| ≤ s/2, or s where the code was clipped to 7 or rounding is stochastic, plus x̂'s rounding to `dtype`.
    A group of values below 2^-123 may decode to zeros; one with a value that is not finite, or whose scale passes the
    scale's dtype (float64 only), decodes to NaN. Takes bfloat16, float16, float32, float64.
    """

    name: ClassVar[str] = "grouped_symmetric"
    group: int = 64
    scale: str = "bfloat16"
    stochastic: bool = False

    def encode(self, x):
        self.check(x.shape, x.dtype)
        return quantize(to_parts(x, self.group, 2), (1, 2), self.scale, self._rounding)

    def decode(self, codes, shape, dtype):
        packed, scale = codes
        return from_parts(dequantize(packed, scale, (1, 2), dtype), shape)

    def layout(self, shape):
        groups, _, half = part_shape(shape, self.group, 2)
        return groups * half, groups


@dataclasses.dataclass(frozen=True)
class GroupedAsymmetric(_Int4):
    """Asymmetric INT4 by groups of the flat array (Adacc 3.2), for values on one side of zero, as softmax's.

    o = (max + min)/2, s = (max − min)/16, q = clip(round((x − o)/s), −8, 7), x̂ = q·s + o. o is stored in `scale`'s
    dtype, and s is then max|x − o|/8, rounded up, so that the bounds of `GroupedSymmetric` hold with this s; fields and
    dtypes are the same. Where |o| is far greater than max − min, a bfloat16 o costs accuracy: take float32.
    """

    name: ClassVar[str] = "grouped_asymmetric"
    scale_sets: ClassVar[int] = 2
    group: int = 64
    scale: str = "bfloat16"
    stochastic: bool = False

    def encode(self, x):
        self.check(x.shape, x.dtype)
        return quantize_offset(to_parts(x, self.group, 2), (1, 2), self.scale, self._rounding)

    def decode(self, codes, shape, dtype):
        packed, scale, offset = codes
        return from_parts(dequantize_offset(packed, scale, offset, (1, 2), dtype), shape)

    layout = GroupedSymmetric.layout


@dataclasses.dataclass(frozen=True)
class ChannelwiseSymmetric(_Int4):
    """Symmetric INT4 with one scale for each channel (index of the last axis) over all tokens (Adacc 3.2: Q, K, V).

    An outlier channel of Q, K or V so has a scale of its own and spoils no other, without being moved in memory; there
    is one scale a channel, however many tokens. The tensor is read twice: a scale is known after the last token.
    A value that is not finite makes its whole channel NaN. Bounds and dtypes as for `GroupedSymmetric`.
    """

    name: ClassVar[str] = "channelwise_symmetric"
    axes: ClassVar[tuple[int, ...]] = (0,)
    scale: str = "bfloat16"
    stochastic: bool = False

    def encode(self, x):
        self.check(x.shape, x.dtype)
        return quantize(to_rows(x, 2), self.axes, self.scale, self._rounding)

    def decode(self, codes, shape, dtype):
        packed, scale = codes
        return from_rows(dequantize(packed, scale, self.axes, dtype), shape)

    def layout(self, shape):
        tokens, _, half = row_shape(shape, 2)
        return tokens * half, 2 * half


@dataclasses.dataclass(frozen=True)
class NaivePerToken(_Int4):
    """Symmetric INT4 with one scale for each token (all of the last axis): Adacc's baseline, which it shows to fail.

    One outlier channel sets the scale of every token. Bounds and dtypes as for `GroupedSymmetric`.
    """

    name: ClassVar[str] = "naive_per_token"
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    scale: str = "bfloat16"

    encode = ChannelwiseSymmetric.encode
    decode = ChannelwiseSymmetric.decode

    def layout(self, shape):
        tokens, _, half = row_shape(shape, 2)
        return tokens * half, tokens
