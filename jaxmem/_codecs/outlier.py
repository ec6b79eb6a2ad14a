"""The outlier-separated codec of Adacc 3.2: outlier channels as they are, the rest as grouped
INT4.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from jaxmem._codecs.base import Checked
from jaxmem._codecs.forms import OutlierSeparatedForm
from jaxmem._codecs.int4 import GroupedSymmetric
from jaxmem_kernels import dequantize_with, quantize_without, wide_dtype

THRESHOLD = 3


@dataclasses.dataclass(frozen=True)
class OutlierSeparated(Checked, OutlierSeparatedForm):
    """Outlier channels (of the last axis) stored exactly, the rest set to `GroupedSymmetric` (Adacc
    3.2).

    S_i = Σ|x| over channel i, Z_i = (S_i − μ)/σ over channels; an outlier has Z_i > 3. `capacity`:
    room for that many outlier channels, filled by greatest S_i; room that is left holds zeros,
    outliers beyond it are quantized with the rest, and `count` tells how many there are. By
    Cantelli fewer than a tenth of the channels can be outliers, so no more room than that is made.
    `group`, `scale`, `stochastic`, dtypes and the bound on the rest as there. Nothing is separated
    from a tensor with values that are not finite.
    """

    @property
    def _rest(self) -> GroupedSymmetric:
        return _Rest(self.group, self.scale, self.stochastic)

    def slots(self, shape: tuple[int, ...]) -> int:
        """How many channels of such a tensor room is made for."""
        return min(self.capacity, _most_outliers(shape))

    def count(self, x):
        """How many channels of `x` have Z > 3: int32 (). What exceeds `slots(x.shape)` is not
        separated.
        """
        self.check(x.shape, x.dtype)
        most = _most_outliers(x.shape)
        return jnp.minimum(_outliers(x)[1].sum(dtype=jnp.int32), most) if most else jnp.int32(0)

    def encode(self, x):
        self.check(x.shape, x.dtype)
        slots = self.slots(x.shape)
        if not slots:
            return self._rest.encode(x)
        channels = x.shape[-1]
        sums, outliers = _outliers(x)
        # lax.top_k of divided channels crashes XLA:GPU's compiler (jax 0.11.2)
        top = jnp.argsort(-sums, stable=True)[:slots]
        # `channels`: an empty slot
        index = jnp.where(outliers[top], top, channels).astype(jnp.int32)
        values = jnp.take(x, index, axis=-1, mode="fill", fill_value=0)
        rows, how = self._rest.encoding(x.shape)
        return (
            *quantize_without(x.reshape(rows), _slot_of(index, channels) < slots, **how),
            values,
            index,
        )

    def decode(self, codes, shape, dtype):
        if not self.slots(shape):
            return self._rest.decode(codes, shape, dtype)
        packed, scales, values, index = codes
        slots = _slot_of(index, shape[-1])
        return dequantize_with(
            packed, scales, values, slots, **self._rest.decoding(shape, dtype)
        ).reshape(shape)

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        slots = self.slots(shape)
        tokens = math.prod(shape[:-1])
        return self._rest.nbytes(shape, dtype) + slots * (tokens * jnp.dtype(dtype).itemsize + 4)


class _Rest(GroupedSymmetric):
    name: ClassVar[str] = OutlierSeparated.name  # the name in its errors


def _most_outliers(shape: tuple[int, ...]) -> int:
    """n of C channels with Z > 3 means n/C < 1/(1 + 3²)."""
    return max(shape[-1] - 1, 0) // (1 + THRESHOLD**2) if shape and math.prod(shape) else 0


def _outliers(x):
    """S (C,) relative to its greatest, and which channels have Z > 3 (bool); none where S is not
    finite.
    """
    sums = jnp.abs(x.astype(wide_dtype(x.dtype))).reshape(-1, x.shape[-1]).sum(0)
    greatest = sums.max()
    sums = sums / jnp.where(greatest > 0, greatest, 1)
    mean = sums.mean()
    deviation = jnp.sqrt(jnp.square(sums - mean).mean())
    return sums, sums - mean > THRESHOLD * deviation


def _slot_of(index, channels: int):
    """For each channel its slot, or the number of slots if it has none: int32 (C,)."""
    slots = index.shape[0]
    return (
        jnp.full(channels, slots, jnp.int32)
        .at[index]
        .set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
    )
