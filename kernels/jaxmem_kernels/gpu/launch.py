"""Launches GPU kernels: computes the grid, the result shapes and the constants of each kernel. The
file of Triton kernels, `int4`, is imported when a kernel is first launched.

Each public function is the `launch` of the operation with the function's name. The arguments are
the GPU's compute capability, then the arrays and the parameters of the operation.
"""

import importlib

import jax
import jax.numpy as jnp

from jaxmem_kernels.gpu import adapter
from jaxmem_kernels.rounding import salt_of

# Number of values of a program, and of its warps of 32 threads: a thread has 32 values, and loads
# 16 bytes at a time.
TILE, WARPS = (
    4096,
    4,
)


def quantize(capability, x, *, group, scale, **how):
    constants = {"K": _groups(x, group), "RAGGED": _ragged(x.shape, group)}
    return _encode("encode", capability, (x,), group, (scale,), **constants, **how)


def quantize_offset(capability, x, *, group, scale, **how):
    constants = {"K": _groups(x, group), "RAGGED": _ragged(x.shape, group)}
    return _encode("encode_offset", capability, (x,), group, (scale, scale), **constants, **how)


def quantize_without(capability, x, taken, *, group, scale, **how):
    arrays = x, taken.astype(jnp.uint8)
    return _encode("encode_without", capability, arrays, group, (scale,), C=taken.size, **how)


def quantize_by(capability, x, scales, *, group, **how):
    return _encode("encode_by", capability, (x, scales), group, (), W=x.shape[-1], **how)


def dequantize(capability, codes, scales, *, width, dtype):
    ragged = _is_ragged(codes, width)
    return _decode("decode", capability, (codes, scales), width, dtype, RAGGED=ragged)


def dequantize_offset(capability, codes, scales, offsets, *, width, dtype):
    arrays, ragged = (codes, scales, offsets), _is_ragged(codes, width)
    return _decode("decode_offset", capability, arrays, width, dtype, RAGGED=ragged)


def dequantize_with(capability, codes, scales, values, slots, *, width, dtype):
    room = values.shape[-1]
    # The kernel reads slots as bytes: the number of the slot plus one, and 0 for no slot.
    which = jnp.where(slots < room, slots + 1, 0).astype(jnp.uint8)
    arrays = codes, scales, values, which
    return _decode("decode_with", capability, arrays, width, dtype, S=room, C=slots.size)


def dequantize_by(capability, codes, scales, *, width, dtype):
    return _decode("decode_by", capability, (codes, scales), width, dtype, W=scales.size)


def _encode(name, capability, arrays, group, scales, *, stochastic, seed=0, **constants):
    """Runs an encoder of the values `arrays[0]`. Without stochastic rounding, the seed is ignored.

    scales: the dtype of each array of scales or offsets that the kernel returns after the codes.
    """
    x, salt = arrays[0], salt_of(seed) if stochastic else 0
    results = _codes(x, group), *(_scales(x, group, scale) for scale in scales)
    constants |= {"STOCHASTIC": stochastic, "SALT": salt}
    return _run(name, capability, (*arrays, x.size), results, group, **constants)


def _decode(name, capability, arrays, width, dtype, **constants):
    """Runs a decoder of the codes `arrays[0]`."""
    x, limit = _rows(arrays[0], width, dtype), float(jnp.finfo(dtype).max)
    # A group's codes are half as many bytes as it has values.
    group = 2 * arrays[0].shape[-1]
    return _run(name, capability, (*arrays, x.size), (x,), group, LIMIT=limit, **constants)


def _run(name, capability, arrays, results, group, **constants):
    """Runs kernel `name`.

    arrays: the operands; one of them is an int, the number of values of the tensor.
    results: the shapes and dtypes of the results.
    group: number of values of a group. The kernel receives it as G, and the rows of its tile as R.
    constants: the other compile-time constants of the kernel.
    """
    kernel = getattr(importlib.import_module("jaxmem_kernels.gpu.int4"), name)
    (size,) = (a for a in arrays if isinstance(a, int))
    # Rows of a program's tile are groups. With a scale for each channel, they are rows of the
    # tensor.
    rows = max(1, TILE // group)
    if "W" in constants:  # a program takes one group of columns, and reads their scales once
        rows *= 2
        grid = (-(-size // constants["W"] // rows) * (constants["W"] // group),)
    else:
        grid = (-(-size // group // rows),)
    # A group of more than TILE values needs a program of its own, with more warps.
    warps = max(WARPS, group * WARPS // TILE)
    return adapter.call(
        kernel, arrays, results, grid, capability, warps, G=group, R=rows, **constants
    )


def _groups(x, group) -> int:
    """Returns the number of groups of a row."""
    return -(-x.shape[-1] // group)


def _codes(x, group):
    return jax.ShapeDtypeStruct((*x.shape[:-1], _groups(x, group), group // 2), jnp.uint8)


def _scales(x, group, scale):
    return jax.ShapeDtypeStruct((*x.shape[:-1], _groups(x, group)), jnp.dtype(scale))


def _rows(codes, width, dtype):
    """Returns the shape and dtype of decoded rows: rows of all groups of this device, which may
    have a part of a row, or rows of `width` values if the last group is short.
    """
    *lead, groups, packed = codes.shape
    whole = groups * 2 * packed
    return jax.ShapeDtypeStruct((*lead, width if width % (2 * packed) else whole), jnp.dtype(dtype))


def _ragged(shape, group) -> bool:
    """Whether a row's last group is short."""
    return shape[-1] % group != 0


def _is_ragged(codes, width) -> bool:
    return _ragged((width,), 2 * codes.shape[-1])
