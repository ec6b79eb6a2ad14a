"""INT4 quantization in groups, two codes to a uint8, by Adacc's schemes. Shapes are those of
`layout`, with two parts.

Values are multiplied by the inverse of the scale that is stored, not of the exact one. A scale is
NaN where a value that it covers is not finite: everything under it decodes to NaN.
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
    scale_beside,
    scale_of,
    wide_dtype,
)


def pack_int4(q):
    """Packs int8 (..., 2, H) in [-8, 7] into uint8 (..., H), the first half in the low bits."""
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
    group: how many values (an even number) share a scale.
    scale: the scales' dtype, "bfloat16" or "float32".
    stochastic: whether to round at random and without bias.
    seed: which random numbers; read where rounding is stochastic.

    s = max|x| / 8 rounded up, q = clip(round(x / s), -8, 7). Raises TypeError or ValueError for
    what it cannot take, as all operations here do.
    """
    checks.tensor("quantize", x)
    checks.group("quantize", group, 2)
    checks.scale("quantize", scale)
    checks.seed("quantize", seed)
    b = _wide(blocks(x, group, 2))
    s = scale_of(greatest(b, (-2, -1)), scale, stochastic)  # one for each group, over both halves
    return _codes(b, b, s[..., None, None], stochastic, seed), s


def dequantize(packed, scales, *, width: int, dtype: str):
    """Returns q·s (*lead, W), brought within the finite range of its dtype.

    packed: codes uint8 (*lead, K, H).
    scales: (*lead, K).
    width: W, how many values a row has.
    dtype: the result's, by name.
    """
    checks.packed("dequantize", packed, width, 2)
    return _decoded(packed, scales[..., None, None], None, width, dtype)


def quantize_offset(x, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Quantizes asymmetrically (Adacc 3.2), and returns codes uint8 (*lead, K, H), scales and
    offsets (*lead, K).

    x: floating (*lead, W).
    group: how many values (an even number) share a scale and an offset.
    scale: the dtype of scales and offsets, "bfloat16" or "float32".
    stochastic: whether to round at random and without bias.
    seed: which random numbers; read where rounding is stochastic.

    s = (max - min) / 15, o = min + 8 s, q = round((x - o) / s): the sixteen codes cover the range,
    and nothing is clipped. o is rounded to `scale`, and s is then max((max - o) / 7, (o - min) / 8)
    rounded up, so that it still covers both ends. Rounding at random takes the same scale.
    """
    checks.tensor("quantize_offset", x)
    checks.group("quantize_offset", group, 2)
    checks.scale("quantize_offset", scale)
    checks.seed("quantize_offset", seed)
    b = _wide(blocks(x, group, 2))
    high, low = jnp.max(b, (-2, -1), initial=-jnp.inf), jnp.min(b, (-2, -1), initial=jnp.inf)
    finite = greatest(b, (-2, -1)) < jnp.inf  # false for NaN too
    o = jnp.where(finite, offset_of(high, low, scale), jnp.nan)
    s = jnp.where(finite, scale_beside(o, high, low, scale), jnp.nan)
    return (
        _codes(b - o[..., None, None], b, s[..., None, None], stochastic, seed),
        s,
        o.astype(scale),
    )


def dequantize_offset(packed, scales, offsets, *, width: int, dtype: str):
    """Returns q·s + o (*lead, W), brought within the finite range of its dtype.

    packed: codes uint8 (*lead, K, H).
    scales, offsets: (*lead, K).
    width: W, how many values a row has.
    dtype: the result's, by name.
    """
    checks.packed("dequantize_offset", packed, width, 2)
    return _decoded(packed, scales[..., None, None], offsets[..., None, None], width, dtype)


def quantize_by(x, scales, *, group: int, stochastic: bool, seed: int = 0):
    """Quantizes by scales that are given, and returns codes uint8 (*lead, K, H).

    x: floating (*lead, W).
    scales: (W,), or any that broadcast to `x`.
    group: how many values (an even number) of a row share bytes, half with half.
    stochastic: whether to round at random and without bias.
    seed: which random numbers; read where rounding is stochastic.
    """
    checks.tensor("quantize_by", x)
    checks.group("quantize_by", group, 2)
    checks.seed("quantize_by", seed)
    b = _wide(blocks(x, group, 2))
    return _codes(b, b, _by(scales, x.shape[-1], group), stochastic, seed)


def dequantize_by(packed, scales, *, width: int, dtype: str):
    """Returns q·s (*lead, W), brought within the finite range of its dtype.

    packed: codes uint8 (*lead, K, H), from `quantize_by`.
    scales: those that it was given.
    width: W, how many values a row has.
    dtype: the result's, by name.
    """
    checks.packed("dequantize_by", packed, width, 2)
    return _decoded(packed, _by(scales, width, 2 * packed.shape[-1]), None, width, dtype)


def quantize_without(x, taken, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Quantizes as `quantize` does, with zeros in place of some channels.

    x: floating (*lead, W), W a multiple of C; channel i is every C-th value from the i-th on.
    taken: bool (C,), which marks the channels that are left out.
    group, scale, stochastic, seed: as for `quantize`.
    """
    checks.tensor("quantize_without", x)
    checks.channels("quantize_without", "taken", taken.size, x.shape[-1])
    # A row may hold several tokens, each with all channels, where axes were merged into it.
    marked = jnp.tile(taken, x.shape[-1] // taken.size)
    x = jnp.where(marked, 0, x)
    return quantize(x, group=group, scale=scale, stochastic=stochastic, seed=seed)


def dequantize_with(packed, scales, values, slots, *, width: int, dtype: str):
    """Decodes as `dequantize` does, with some channels as they were stored.

    packed, scales: from `quantize_without`.
    values: (..., k), the values of k channels.
    slots: int32 (C,): channel i is `values` at slots[i] where that is below k, else it is decoded.
      No two channels share a slot below k.
    width, dtype: as for `dequantize`.
    """
    checks.channels("dequantize_with", "slots", slots.size, width)
    rest = dequantize(packed, scales, width=width, dtype=dtype)
    # Channels without a slot take any value here: the last line does not read it.
    exact = jnp.take(values, slots, axis=-1, mode="clip").reshape(rest.shape).astype(dtype)
    return jnp.where(jnp.tile(slots < values.shape[-1], width // slots.size), exact, rest)


def _wide(x):
    return x.astype(wide_dtype(x.dtype))


def _by(scales, width: int, group: int):
    """`scales`, shaped so that each meets its values in (..., K, 2, H): one for each value of a
    row, or one for all of it.
    """
    return blocks(scales, group, 2) if scales.shape[-1] == width else scales[..., None, None]


def _codes(distance, x, scale, stochastic: bool, seed: int):
    """The packed codes of `distance` (*lead, K, 2, H) by `scale`; random bits come from `x`, the
    values themselves.
    """
    y = distance * inverse(scale.astype(distance.dtype))
    y = jnp.where(y >= -8, jnp.minimum(y, 7), -8)  # NaN is -8
    q = round_stochastic(y, x, seed) if stochastic else jnp.round(y)
    return pack_int4(q.astype(jnp.int8))


def _decoded(packed, scale, offset, width: int, dtype: str):
    wide = wide_dtype(dtype)
    x = unpack_int4(packed).astype(wide) * scale.astype(wide)
    x = x if offset is None else x + offset.astype(wide)
    # -8·s can pass the greatest number of `dtype`, where the scale was rounded up. NaN stays.
    limit = float(jnp.finfo(dtype).max)
    return unblocked(jnp.clip(x, -limit, limit).astype(dtype), width)
