"""Which arrays a TPU's kernels take. For all other arrays, XLA compiles the reference.

Each public function but `launcher` has the name of an operation. Its arguments are the shapes and
dtypes of the operation's arrays, and the operation's parameters.
"""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp

from jaxmem_kernels.tpu import blocks, launch

# TPUs do not support float16, and compute float64 in several float32.
FLOATS = ("bfloat16", "float32")
# In the few microseconds in which a kernel starts, memory moves this many values.
LEAST_SIZE = 2**16
MOST_SLOTS = 64  # the code over slots is unrolled


def launcher(name: str, *avals, **params) -> Callable[..., tuple] | None:
    """Returns the launch of the operation `name` as a function of the arrays; None if no kernel
    takes the arrays.
    """
    if not globals()[name](*avals, **params):
        return None
    return functools.partial(getattr(launch, name), **params)


def quantize(x, *, group: int, **_) -> bool:
    return _takes(x.shape, group, 2) and x.dtype.name in FLOATS


quantize_offset = quantize


def quantize_by(x, channels, *, group: int, **_) -> bool:
    return quantize(x, group=group) and channels.shape == x.shape[-1:]


quantize_without = quantize_by


def quantize_channelwise(x, *, group: int, **_) -> bool:
    """Whether all tokens of some channels fit a program. Otherwise separate operations run, which
    read the tensor twice.
    """
    held = blocks.fitting_channels(x.shape, group, 2, x.dtype.itemsize)
    return quantize(x, group=group) and held is not None


def quantize_separated(x, index, *, group: int, **_) -> bool:
    return quantize(x, group=group) and 0 < index.size <= MOST_SLOTS


def dequantize(codes, *_, width: int, dtype: str) -> bool:
    return _takes_codes(codes, width, 2) and jnp.dtype(dtype).name in FLOATS


dequantize_offset = dequantize


def dequantize_by(codes, channels, *, width: int, dtype: str) -> bool:
    return dequantize(codes, width=width, dtype=dtype) and channels.shape == (width,)


def dequantize_with(codes, scales, values, slots, *, width: int, dtype: str) -> bool:
    return dequantize_by(codes, slots, width=width, dtype=dtype) and (
        0 < values.shape[-1] <= MOST_SLOTS and values.dtype.name in FLOATS
    )


def pack_bits(x, _, *, group: int) -> bool:
    return _takes(x.shape, group, 8) and x.dtype.itemsize <= 4


def unpack_bits(codes, zero, _, *, width: int) -> bool:
    return _takes_codes(codes, width, 8) and zero.dtype.itemsize <= 4


def _takes(shape: tuple[int, ...], group: int, parts: int) -> bool:
    divided = blocks.fitting(shape, group, parts)
    return divided is not None and math.prod(shape) >= LEAST_SIZE


def _takes_codes(codes, width: int, parts: int) -> bool:
    return _takes((*codes.shape[:-2], width), parts * codes.shape[-1], parts)
