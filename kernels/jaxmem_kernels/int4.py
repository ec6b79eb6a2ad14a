"""INT4 quantization in groups, two codes to a uint8, by Adacc's schemes. Shapes are those of
`layout`, with two parts.

`group` is how many values share a scale, `scale` the dtype of the stored scales ("bfloat16" or
"float32"), `stochastic` whether values are rounded at random and without bias, `width` the length W
of a decoded row, and `dtype` the dtype of the decoded values.

Values are multiplied by the inverse of the scale that is stored, not of the exact one. A scale is
NaN where a value that it covers is not finite: everything under it decodes to NaN.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem_kernels import checks
from jaxmem_kernels.layout import blocks, unblocked
from jaxmem_kernels.rounding import (
    EXACT_DIGITS,
    LEAST_OFFSET,
    greatest,
    inverse,
    round_stochastic,
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


def quantize(x, *, group: int, scale: str, stochastic: bool):
    """Quantizes `x` (*lead, W) symmetrically (Adacc 3.2): codes uint8 (*lead, K, H) and scales
    (*lead, K) of dtype `scale`.

    s = max|x| / 8 rounded up, q = clip(round(x / s), -8, 7).
    """
    checks.tensor("quantize", x)
    checks.group("quantize", group, 2)
    checks.scale("quantize", scale)
    b = _wide(blocks(x, group, 2))
    s = scale_of(greatest(b, (-2, -1)), scale, stochastic)
    return _codes(b, b, s[..., None, None], stochastic), s


def dequantize(packed, scales, *, width: int, dtype: str):
    """Returns q·s as `dtype` (*lead, W), brought within its finite range."""
    checks.packed("dequantize", packed, width, 2)
    return _decoded(packed, scales[..., None, None], None, width, dtype)


def quantize_offset(x, *, group: int, scale: str, stochastic: bool):
    """Quantizes `x` (*lead, W) asymmetrically (Adacc 3.2): codes uint8 (*lead, K, H), scales and
    offsets (*lead, K).

    o = (max + min) / 2 rounded to `scale`, s = max|x - o| / 8 rounded up, q = clip(round((x - o) /
    s), -8, 7). With an exact o that is (max - min) / 16; with a rounded one, s still covers the
    values furthest from it.
    """
    checks.tensor("quantize_offset", x)
    checks.group("quantize_offset", group, 2)
    checks.scale("quantize_offset", scale)
    b = _wide(blocks(x, group, 2))
    high, low = jnp.max(b, (-2, -1), initial=-jnp.inf), jnp.min(b, (-2, -1), initial=jnp.inf)
    finite = greatest(b, (-2, -1)) < jnp.inf  # false for NaN too
    # Halves are added, since max + min may be infinite.
    o = jnp.where(finite, _stored_offset(high / 2 + low / 2, scale), jnp.nan)
    # EXACT_DIGITS: q·s is then exact, and adding o rounds once, fused or not.
    s = scale_of(
        jnp.where(finite, jnp.maximum(high - o, o - low), jnp.nan), scale, stochastic, EXACT_DIGITS
    )
    return _codes(b - o[..., None, None], b, s[..., None, None], stochastic), s, o.astype(scale)


def dequantize_offset(packed, scales, offsets, *, width: int, dtype: str):
    """Returns q·s + o as `dtype` (*lead, W), brought within its finite range."""
    checks.packed("dequantize_offset", packed, width, 2)
    return _decoded(packed, scales[..., None, None], offsets[..., None, None], width, dtype)


def quantize_by(x, scales, *, group: int, stochastic: bool):
    """Quantizes `x` (*lead, W) by `scales` that are given, (W,) or any that broadcast to `x`: codes
    uint8 (*lead, K, H).
    """
    checks.tensor("quantize_by", x)
    checks.group("quantize_by", group, 2)
    b = _wide(blocks(x, group, 2))
    return _codes(b, b, _by(scales, x.shape[-1], group), stochastic)


def dequantize_by(packed, scales, *, width: int, dtype: str):
    """Returns q·s as `dtype` (*lead, W), for what `quantize_by` made of the same `scales`."""
    checks.packed("dequantize_by", packed, width, 2)
    return _decoded(packed, _by(scales, width, 2 * packed.shape[-1]), None, width, dtype)


def quantize_without(x, taken, *, group: int, scale: str, stochastic: bool):
    """Quantizes `x` as `quantize` does, with zeros in place of the channels that `taken` (bool,
    (C,)) marks: channel i is every C-th value of a row, from the i-th on.
    """
    checks.tensor("quantize_without", x)
    checks.channels("quantize_without", "taken", taken.size, x.shape[-1])
    marked = jnp.tile(taken, x.shape[-1] // taken.size)
    return quantize(jnp.where(marked, 0, x), group=group, scale=scale, stochastic=stochastic)


def dequantize_with(packed, scales, values, slots, *, width: int, dtype: str):
    """Decodes as `dequantize` does, with some channels as they were stored: channel i is
    `values` (..., k) at slots[i] (int32, (C,)) where that is below k.
    """
    checks.channels("dequantize_with", "slots", slots.size, width)
    rest = dequantize(packed, scales, width=width, dtype=dtype)
    exact = jnp.take(values, slots, axis=-1, mode="clip").reshape(rest.shape).astype(dtype)
    return jnp.where(jnp.tile(slots < values.shape[-1], width // slots.size), exact, rest)


def _wide(x):
    return x.astype(wide_dtype(x.dtype))


def _by(scales, width: int, group: int):
    """`scales`, shaped so that each meets its values in (..., K, 2, H): one for each value of a
    row, or one for all of it.
    """
    return blocks(scales, group, 2) if scales.shape[-1] == width else scales[..., None, None]


def _codes(distance, x, scale, stochastic: bool):
    """The packed codes of `distance` (*lead, K, 2, H) by `scale`; random bits come from `x`, the
    values themselves.
    """
    y = distance * inverse(scale.astype(distance.dtype))
    y = jnp.where(y >= -8, jnp.minimum(y, 7), -8)  # NaN is -8
    return pack_int4((round_stochastic(y, x) if stochastic else jnp.round(y)).astype(jnp.int8))


def _stored_offset(offset, dtype):
    """`offset`, rounded to the nearest number that is stored: finite, of 8 exponent bits, and 0 if
    it is tiny.
    """
    limit = float(jnp.finfo(dtype).max)
    offset = lax.reduce_precision(jnp.clip(offset, -limit, limit), 8, jnp.finfo(dtype).nmant)
    return jnp.where(jnp.abs(offset) < LEAST_OFFSET, 0, offset)


def _decoded(packed, scale, offset, width: int, dtype: str):
    wide = wide_dtype(dtype)
    x = unpack_int4(packed).astype(wide) * scale.astype(wide)
    x = x if offset is None else x + offset.astype(wide)
    # -8·s can pass the greatest number of `dtype`, where the scale was rounded up. NaN stays.
    limit = float(jnp.finfo(dtype).max)
    return unblocked(jnp.clip(x, -limit, limit).astype(dtype), width)
