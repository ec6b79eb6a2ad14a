"""INT4 quantization in groups, two codes to a uint8, by Adacc's schemes. `layout` defines the
shapes, with two parts.

Values are multiplied by the inverse of the stored scale, not of the exact scale. If a value of a
group is not finite, the scale of the group is NaN, and the whole group decodes to NaN.
"""

import jax.numpy as jnp
import numpy as np

from jaxmem_kernels import checks
from jaxmem_kernels.layout import blocks, unblocked
from jaxmem_kernels.rounding import (
    greatest,
    inverse,
    offset_of,
    round_stochastic,
    scale_around_offset,
    scale_of,
    wide_dtype,
)


def pack_int4(q):
    """Packs int8 (..., 2, H) in [-8, 7] into uint8 (..., H). The first half is in the low bits."""
    q = q.astype(jnp.uint8)
    return (q[..., 0, :] & 15) | (q[..., 1, :] << 4)


def unpack_int4(packed):
    """The inverse of `pack_int4`."""
    # The four bits are two's complement: x ^ 8 is the code + 8.
    nibbles = (packed[..., None, :] >> np.array([[0], [4]], np.uint8)) & 15
    return (nibbles ^ 8).astype(jnp.int8) - 8


def quantize(x, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Quantizes symmetrically (Adacc 3.2), and returns codes uint8 (*lead, K, H) and scales
    (*lead, K).

    x: floating (*lead, W).
    group: number of values (an even number) that share a scale.
    scale: the scales' dtype, "bfloat16" or "float32".
    stochastic: whether rounding is stochastic and unbiased.
    seed: the seed of stochastic rounding.

    s = max|x| / 8 rounded up, q = clip(round(x / s), -8, 7). Raises TypeError or ValueError for
    arguments that it does not support, as all operations here do.
    """
    checks.tensor("quantize", x)
    checks.group("quantize", group, 2)
    checks.scale("quantize", scale)
    checks.seed("quantize", seed)
    b = _wide(blocks(x, group, 2))
    s = scale_of(greatest(b, (-2, -1)), scale, stochastic)  # one scale for both halves of a group
    return _codes(b, b, s[..., None, None], stochastic, seed), s


def dequantize(packed, scales, *, width: int, dtype: str):
    """Returns q·s (*lead, W), clipped to the finite range of its dtype.

    packed: codes uint8 (*lead, K, H).
    scales: (*lead, K).
    width: W, the number of values of a row.
    dtype: the name of the result's dtype.
    """
    checks.packed("dequantize", packed, width, 2)
    return _decoded(packed, scales[..., None, None], None, width, dtype)


def quantize_offset(x, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Quantizes asymmetrically (Adacc 3.2), and returns codes uint8 (*lead, K, H), scales and
    offsets (*lead, K).

    x: floating (*lead, W).
    group: number of values (an even number) that share a scale and an offset.
    scale: the dtype of scales and offsets, "bfloat16" or "float32".
    stochastic: whether rounding is stochastic and unbiased.
    seed: the seed of stochastic rounding.

    s = (max - min) / 15, o = min + 8 s, q = round((x - o) / s): the sixteen codes cover the range,
    and no value is clipped. o is rounded to `scale`. s is then max((max - o) / 7, (o - min) / 8)
    rounded up, so that the codes still cover both ends. Stochastic rounding uses the same scale.
    """
    checks.tensor("quantize_offset", x)
    checks.group("quantize_offset", group, 2)
    checks.scale("quantize_offset", scale)
    checks.seed("quantize_offset", seed)
    b = _wide(blocks(x, group, 2))
    high, low = jnp.max(b, (-2, -1), initial=-jnp.inf), jnp.min(b, (-2, -1), initial=jnp.inf)
    finite = greatest(b, (-2, -1)) < jnp.inf  # false for NaN too
    o = jnp.where(finite, offset_of(high, low, scale), jnp.nan)
    s = jnp.where(finite, scale_around_offset(o, high, low, scale), jnp.nan)
    return (
        _codes(b - o[..., None, None], b, s[..., None, None], stochastic, seed),
        s,
        o.astype(scale),
    )


def dequantize_offset(packed, scales, offsets, *, width: int, dtype: str):
    """Returns q·s + o (*lead, W), clipped to the finite range of its dtype.

    packed: codes uint8 (*lead, K, H).
    scales, offsets: (*lead, K).
    width: W, the number of values of a row.
    dtype: the name of the result's dtype.
    """
    checks.packed("dequantize_offset", packed, width, 2)
    return _decoded(packed, scales[..., None, None], offsets[..., None, None], width, dtype)


def quantize_by(x, scales, *, group: int, stochastic: bool, seed: int = 0):
    """Quantizes by given scales, and returns codes uint8 (*lead, K, H).

    x: floating (*lead, W).
    scales: (W,), or any shape that broadcasts to `x`.
    group: number of values (an even number) of a row whose two halves share bytes.
    stochastic: whether rounding is stochastic and unbiased.
    seed: the seed of stochastic rounding.
    """
    checks.tensor("quantize_by", x)
    checks.group("quantize_by", group, 2)
    checks.seed("quantize_by", seed)
    b = _wide(blocks(x, group, 2))
    return _codes(b, b, _by(scales, x.shape[-1], group), stochastic, seed)


def dequantize_by(packed, scales, *, width: int, dtype: str):
    """Returns q·s (*lead, W), clipped to the finite range of its dtype.

    packed: codes uint8 (*lead, K, H), from `quantize_by`.
    scales: the scales that `quantize_by` received.
    width: W, the number of values of a row.
    dtype: the name of the result's dtype.
    """
    checks.packed("dequantize_by", packed, width, 2)
    return _decoded(packed, _by(scales, width, 2 * packed.shape[-1]), None, width, dtype)


def quantize_without(x, taken, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Quantizes as `quantize` does, with zeros in place of some channels.

    x: floating (*lead, W), W a multiple of C; channel i is every C-th value from the i-th on.
    taken: bool (C,), true for the channels that are replaced by zeros.
    group, scale, stochastic, seed: as for `quantize`.
    """
    checks.tensor("quantize_without", x)
    checks.channels("quantize_without", "taken", taken.size, x.shape[-1])
    # If axes were merged, a row has several tokens, each with all channels.
    marked = jnp.tile(taken, x.shape[-1] // taken.size)
    x = jnp.where(marked, 0, x)
    return quantize(x, group=group, scale=scale, stochastic=stochastic, seed=seed)


def dequantize_with(packed, scales, values, slots, *, width: int, dtype: str):
    """Decodes as `dequantize` does, with the exact values of some channels.

    packed, scales: from `quantize_without`.
    values: (..., k), the values of k channels.
    slots: int32 (C,): if slots[i] is below k, channel i is `values` at slots[i]; otherwise it is
      decoded. Different channels have different slots below k.
    width, dtype: as for `dequantize`.
    """
    checks.channels("dequantize_with", "slots", slots.size, width)
    rest = dequantize(packed, scales, width=width, dtype=dtype)
    # Channels without a slot get an arbitrary value here, which the last line does not read.
    exact = jnp.take(values, slots, axis=-1, mode="clip").reshape(rest.shape).astype(dtype)
    return jnp.where(jnp.tile(slots < values.shape[-1], width // slots.size), exact, rest)


def _wide(x):
    return x.astype(wide_dtype(x.dtype))


def _by(scales, width: int, group: int):
    """Reshapes scales to broadcast to values (..., K, 2, H). There is one scale for each value of a
    row, or one scale for the whole row.
    """
    return blocks(scales, group, 2) if scales.shape[-1] == width else scales[..., None, None]


def _codes(distance, x, scale, stochastic: bool, seed: int):
    """Returns the packed codes of `distance` (*lead, K, 2, H) by `scale`. The random bits are a
    hash of the values `x`.
    """
    y = distance * inverse(scale.astype(distance.dtype))
    y = jnp.where(y >= -8, jnp.minimum(y, 7), -8)  # NaN is -8
    q = round_stochastic(y, x, seed) if stochastic else jnp.round(y)
    return pack_int4(q.astype(jnp.int8))


def _decoded(packed, scale, offset, width: int, dtype: str):
    wide = wide_dtype(dtype)
    codes, scale = unpack_int4(packed).astype(wide), scale.astype(wide)
    # Halves: -8·s can overflow where its sum with the offset is finite. Halves are exact, since a
    # scale is at least `LEAST`, twice the least normal number of float32.
    offset = None if offset is None else offset.astype(wide) / 2
    x = codes * scale if offset is None else (codes * (scale / 2) + offset) * 2
    # -8·s can exceed the greatest number of `dtype`, since s was rounded up. NaN remains NaN.
    limit = float(jnp.finfo(dtype).max)
    return unblocked(jnp.clip(x, -limit, limit).astype(dtype), width)
