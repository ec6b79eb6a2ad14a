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


def quantize(capability, x, *, group, scale, stochastic, seed=0):
    results, ragged = (_codes(x, group), _scales(x, group, scale)), _ragged(x.shape, group)
    return _run(
        "encode",
        capability,
        (x, x.size),
        results,
        group,
        K=_groups(x, group),
        **_rounding(stochastic, seed),
        RAGGED=ragged,
    )


def quantize_offset(capability, x, *, group, scale, stochastic, seed=0):
    scales, ragged = _scales(x, group, scale), _ragged(x.shape, group)
    results = _codes(x, group), scales, scales
    return _run(
        "encode_offset",
        capability,
        (x, x.size),
        results,
        group,
        K=_groups(x, group),
        **_rounding(stochastic, seed),
        RAGGED=ragged,
    )


def quantize_without(capability, x, taken, *, group, scale, stochastic, seed=0):
    arrays, results = (
        (x, taken.astype(jnp.uint8), x.size),
        (_codes(x, group), _scales(x, group, scale)),
    )
    return _run(
        "encode_without",
        capability,
        arrays,
        results,
        group,
        C=taken.size,
        **_rounding(stochastic, seed),
    )


def quantize_by(capability, x, scales, *, group, stochastic, seed=0):
    width = x.shape[-1]
    arrays = x, scales, x.size
    return _run(
        "encode_by",
        capability,
        arrays,
        (_codes(x, group),),
        group,
        W=width,
        **_rounding(stochastic, seed),
    )


def dequantize(capability, codes, scales, *, width, dtype):
    return _decode(
        "decode", capability, (codes, scales), width, dtype, RAGGED=_is_ragged(codes, width)
    )


def dequantize_offset(capability, codes, scales, offsets, *, width, dtype):
    ragged = _is_ragged(codes, width)
    return _decode(
        "decode_offset", capability, (codes, scales, offsets), width, dtype, RAGGED=ragged
    )


def dequantize_with(capability, codes, scales, values, slots, *, width, dtype):
    room = values.shape[-1]
    # The kernel reads slots as bytes: the number of the slot plus one, and 0 for no slot.
    which = jnp.where(slots < room, slots + 1, 0).astype(jnp.uint8)
    return _decode(
        "decode_with",
        capability,
        (codes, scales, values, which),
        width,
        dtype,
        S=room,
        C=slots.size,
    )


def dequantize_by(capability, codes, scales, *, width, dtype):
    return _decode("decode_by", capability, (codes, scales), width, dtype, W=scales.size)


def _decode(name, capability, arrays, width, dtype, **constants):
    x, limit = _rows(arrays[0], width, dtype), float(jnp.finfo(dtype).max)
    # A group's codes are half as many bytes as it has values.
    return _run(
        name, capability, (*arrays, x.size), (x,), 2 * arrays[0].shape[-1], LIMIT=limit, **constants
    )


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


def _rounding(stochastic, seed) -> dict:
    """Returns a kernel's constants for rounding. Without stochastic rounding, the seed is
    ignored.
    """
    return {"STOCHASTIC": stochastic, "SALT": salt_of(seed) if stochastic else 0}


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
