"""INT4 quantization of (R, 2, H) blocks, two codes to a uint8: Adacc's symmetric and asymmetric schemes.

`axes` are those of (R, 2, H) over which values share a scale: (1, 2) for a scale a row, (0,) for a scale a column.
Scales and offsets are flat. Values are quantized against the scale that is stored, not against the exact one.
A scale is NaN where a value that it covers is not finite: everything under it decodes to NaN.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem_kernels.rounding import LEAST, NEAREST, Rounding, round_up


def pack_int4(q):
    """int8 (R, 2, H) in [-8, 7] to uint8 (R, H): the first half in the low four bits."""
    q = q.astype(jnp.uint8)
    return (q[:, 0] & 15) | (q[:, 1] << 4)


def unpack_int4(packed):
    """The inverse of `pack_int4`."""
    nibbles = (packed[:, None, :] >> np.array([[[0], [4]]], np.uint8)) & 15
    return (nibbles ^ 8).astype(jnp.int8) - 8


def quantize(x, axes, scale_dtype, rounding: Rounding = NEAREST):
    """Symmetric (Adacc 3.2): codes uint8 (R, H) and scales, for floating `x` (R, 2, H).

    s = max|x| / 8 rounded up to `scale_dtype`, q = clip(round(x / s), -8, 7).
    """
    x = x.astype(wide_dtype(x.dtype))
    greatest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0)
    scale = round_up(greatest / rounding.levels, scale_dtype)
    return pack_int4(_codes(x, x, scale, rounding)), scale.reshape(-1)


def dequantize(packed, scale, axes, dtype):
    """q·s as `dtype` (R, 2, H), brought within its finite range."""
    wide = wide_dtype(dtype)
    return _narrow(unpack_int4(packed).astype(wide) * _spread(scale, packed, axes, wide), dtype)


def quantize_offset(x, axes, scale_dtype, rounding: Rounding = NEAREST):
    """Asymmetric (Adacc 3.2): codes uint8 (R, H), scales and offsets, for floating `x` (R, 2, H).

    o = (max + min) / 2 rounded to `scale_dtype`, s = max|x - o| / 8 rounded up, q = clip(round((x - o) / s), -8, 7).
    With an exact o that is (max - min) / 16; with a rounded one, s still covers the values furthest from it.
    """
    x = x.astype(wide_dtype(x.dtype))
    high, low = jnp.max(x, axes, keepdims=True, initial=-jnp.inf), jnp.min(x, axes, keepdims=True, initial=jnp.inf)
    offset = _stored_offset(high / 2 + low / 2, scale_dtype)
    scale = round_up(jnp.maximum(high - offset, offset - low) / rounding.levels, scale_dtype)
    packed = pack_int4(_codes(x - offset, x, scale, rounding))
    return packed, scale.reshape(-1), offset.astype(scale_dtype).reshape(-1)


def dequantize_offset(packed, scale, offset, axes, dtype):
    """q·s + o as `dtype` (R, 2, H), brought within its finite range."""
    wide = wide_dtype(dtype)
    scale, offset = (_spread(a, packed, axes, wide) for a in (scale, offset))
    return _narrow(unpack_int4(packed).astype(wide) * scale + offset, dtype)


def wide_dtype(dtype):
    """What arithmetic on values of a floating `dtype` is done in: float32 at least."""
    return jnp.float64 if jnp.dtype(dtype).itemsize == 8 else jnp.float32


def _codes(distance, x, scale, rounding: Rounding):
    divisor = jnp.where(scale > 0, scale, 1).astype(distance.dtype)
    return jnp.clip(rounding.codes(distance / divisor, x), -8, 7).astype(jnp.int8)


def _stored_offset(offset, dtype):
    limit = float(jnp.finfo(dtype).max)
    offset = lax.reduce_precision(jnp.clip(offset, -limit, limit), 8, jnp.finfo(dtype).nmant)
    return jnp.where(jnp.abs(offset) < LEAST, 0, offset)  # XLA flushes it or not


def _spread(scale, packed, axes, wide):
    rows, width = packed.shape
    return scale.astype(wide).reshape([1 if axis in axes else n for axis, n in enumerate((rows, 2, width))])


def _narrow(x, dtype):
    limit = float(jnp.finfo(dtype).max)  # -8·s can pass it, where the scale was rounded up; NaN stays
    return jnp.clip(x, -limit, limit).astype(dtype)
