"""The codec that stores outlier channels exactly, and other channels as INT4 (Adacc §3.2)."""

import dataclasses
import math
from typing import ClassVar

import jaxmem_kernels as kernels
from jaxmem._model.codecs.base import NamedCodec, check_integer, dtype_of
from jaxmem._model.codecs.int4 import GroupedSymmetric, check_quantizer
from jaxmem.errors import TagError

THRESHOLD = 3  # an outlier's standard deviations above the mean (Adacc 3.2)
MOST_CHANNELS = 2**31 - 1  # an index is an int32


@dataclasses.dataclass(frozen=True)
class OutlierSeparated(NamedCodec):
    """Outlier channels stored exactly, and other channels as grouped INT4 (Adacc §3.2).

    A channel is an index of the last axis. S_i is the sum of |x| over channel i, and Z_i = (S_i −
    μ)/σ with the mean μ and the standard deviation σ over channels. Channel i is an outlier if Z_i
    > 3. `GroupedSymmetric` quantizes the other channels.

    group: number of values of the other channels that share a scale, an even number.
    scale: dtype of the stored scales, bfloat16 or float32. Scales are rounded up.
    capacity: number of outlier channels that can be stored exactly. Outlier channels with the
      greatest S_i come first. Unused capacity holds zeros. Outlier channels beyond the capacity are
      quantized with the other channels.
    stochastic, seed: stochastic rounding of the other channels, as for `GroupedSymmetric`.

    By Cantelli's inequality, fewer than a tenth of the channels can be outliers, so the codec never
    stores more channels exactly. The error bounds of `GroupedSymmetric` apply to the other
    channels, and the same dtypes are supported. If a tensor has values that are not finite, no
    channel is separated. `check` refuses a tensor with more than 2^31 − 1 channels.
    """

    name: ClassVar[str] = "outlier_separated"
    group: int = 64
    scale: str = "bfloat16"
    capacity: int = 8
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self):
        check_integer(self.name, "capacity", self.capacity, 0)
        check_quantizer(self)  # the fields of the codec of the other channels

    @property
    def _rest(self) -> GroupedSymmetric:
        """The codec of the channels that are not stored exactly."""
        return GroupedSymmetric(self.group, self.scale, self.stochastic, self.seed)

    def check(self, shape: tuple[int, ...], dtype) -> None:
        super().check(shape, dtype)
        channels = shape[-1] if shape else 1
        # A dimension is symbolic if a program is exported for any batch size.
        if isinstance(channels, int) and channels > MOST_CHANNELS and self.capacity:
            raise TagError(
                f"{self.name}: `x` has {channels} channels, the last axis of its shape"
                f" {tuple(shape)}; expected at most {MOST_CHANNELS}, whose index is an int32: give"
                " the tensor an axis of channels, or take grouped_symmetric"
            )

    def with_room_for(self, count: int) -> "OutlierSeparated":
        """Returns the codec with capacity for `count` outlier channels.

        The capacity is a power of two, or one and a half times a power of two, so that similar
        counts have one codec.
        """
        least = 1 << max(count - 1, 0).bit_length()
        fits = next(room for room in (least // 4 * 3, least) if room >= count) if count else 0
        return dataclasses.replace(self, capacity=fits)

    def slots(self, shape: tuple[int, ...]) -> int:
        """Returns the number of channels that are stored exactly for a tensor of this shape."""
        return min(self.capacity, _most_outliers(shape))

    def count(self, x):
        """Returns the number of channels of `x` with Z > 3, an int32 scalar.

        Outlier channels beyond `slots(x.shape)` are not stored exactly.
        """
        import jax.numpy as jnp

        self.check(x.shape, x.dtype)
        most = _most_outliers(x.shape)
        return jnp.minimum(_outliers(x)[1].sum(dtype=jnp.int32), most) if most else jnp.int32(0)

    def encode(self, x):
        import jax.numpy as jnp

        self.check(x.shape, x.dtype)
        slots = self.slots(x.shape)
        if not slots:
            return self._rest.encode(x)
        channels = x.shape[-1]
        sums, outliers = _outliers(x)
        # Remove with a fix: lax.top_k of divided channels crashes XLA:GPU's compiler (jax 0.11.2).
        top = jnp.argsort(-sums, stable=True)[:slots]
        # The index of an empty slot is `channels`, beyond the last channel: zeros are stored there.
        index = jnp.where(outliers[top], top, channels).astype(jnp.int32)
        rows, how = self._rest.encoding(x.shape)
        if rows == x.shape:
            return *kernels.quantize_separated(x, index, **how), index
        # A row holds several tokens, and the marks of channels repeat for each token.
        values = kernels.channels_of(x, index)
        taken = _slot_of(index, channels) < slots
        return *kernels.quantize_without(kernels.as_rows(x, rows), taken, **how), values, index

    def decode(self, codes, shape, dtype):
        if not self.slots(shape):
            return self._rest.decode(codes, shape, dtype)
        packed, scales, values, index = codes
        slots = _slot_of(index, shape[-1])
        return kernels.dequantize_with(
            packed, scales, values, slots, **self._rest.decoding(shape, dtype)
        ).reshape(shape)

    def nbytes(self, shape, dtype) -> int:
        self.check(shape, dtype)
        slots = self.slots(shape)
        tokens = math.prod(shape[:-1])
        # A slot has a value for each token, and the int32 index of its channel.
        return self._rest.nbytes(shape, dtype) + slots * (tokens * dtype_of(dtype).itemsize + 4)


def _most_outliers(shape: tuple[int, ...]) -> int:
    """Returns the greatest n that Cantelli's inequality allows: n of C channels have Z > 3 only if
    n/C < 1/(1 + 3²).
    """
    return max(shape[-1] - 1, 0) // (1 + THRESHOLD**2) if shape and math.prod(shape) else 0


def z_scores(x):
    """Returns Z (C,) of the channels of `x`, float32: 0 where all are alike or `x` is empty, NaN
    where a value is not finite.
    """
    import jax.numpy as jnp

    x = x[None] if x.ndim == 0 else x
    if not x.size:
        return jnp.zeros(x.shape[-1], jnp.float32)
    # Sums over axes, without a reshape: on a mesh with explicit axes, JAX may not know the sharding
    # of a flat array.
    sums = jnp.abs(x.astype(kernels.wide_dtype(x.dtype))).sum(tuple(range(x.ndim - 1)))
    sums = sums / jnp.where(sums.max() > 0, sums.max(), 1)
    apart = sums - sums.mean()
    deviation = jnp.sqrt(jnp.square(apart).mean())
    return (apart / jnp.where(deviation == 0, 1, deviation)).astype(jnp.float32)


def _outliers(x):
    """Returns S (C,) divided by the greatest S, so that squares cannot overflow, and whether each
    channel has Z > 3 (bool). No channel has Z > 3 if an S is not finite, since no comparison with
    NaN is true.
    """
    import jax.numpy as jnp

    # Sums over axes, without a reshape: axes that are divided by their types would be gathered
    # before they are merged.
    sums = jnp.abs(x.astype(kernels.wide_dtype(x.dtype))).sum(tuple(range(x.ndim - 1)))
    sums = kernels.undivided(sums)  # JAX cannot sort an axis that is divided by its type
    greatest = sums.max()
    sums = sums / jnp.where(greatest > 0, greatest, 1)
    mean = sums.mean()
    deviation = jnp.sqrt(jnp.square(sums - mean).mean())
    return sums, sums - mean > THRESHOLD * deviation


def _slot_of(index, channels: int):
    """Returns each channel's slot, or the number of slots if it has none: int32 (C,)."""
    import jax.numpy as jnp

    slots = index.shape[0]
    return (
        jnp.full(channels, slots, jnp.int32)
        .at[index]
        .set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
    )
