"""Which arrays a GPU's kernels take. For all other arrays, XLA compiles the reference.

Each public function is the `takes` of a `dispatch.Kernel`: a function of the shapes and dtypes of
an operation's arrays, and of the operation's parameters.
"""

import math

import jax.numpy as jnp

FLOATS = ("bfloat16", "float16", "float32")
# 16 to 8192 values: a thread loads 16 adjacent bytes, and a program has a few thousand values.
GROUPS = tuple(2**i for i in range(4, 14))
# In the few microseconds of a launch, memory moves this many values. XLA also fuses a reference
# with adjacent operations, which a kernel excludes.
LEAST_SIZE = 2**16
MOST_SLOTS = 255  # a slot's number is a byte in the kernel, and 0 means no slot


def _takes(shape, group: int, dtype) -> bool:
    """Whether the shape has rows of whole groups, or one axis, whose last group may be short."""
    # A dimension is symbolic if a program is exported for any batch size.
    if (
        not all(isinstance(n, int) for n in shape)
        or math.prod(shape) < LEAST_SIZE
        or group not in GROUPS
    ):
        return False
    return jnp.dtype(dtype).name in FLOATS and (shape[-1] % group == 0 or len(shape) == 1)


def encodes(x, *_, group: int, **__) -> bool:
    return _takes(x.shape, group, x.dtype)


def decodes(codes, *_, width: int, dtype: str) -> bool:
    # A group's codes are half as many bytes as it has values.
    return _takes((*codes.shape[:-2], width), 2 * codes.shape[-1], dtype)


def encodes_by(x, channels, *, group: int, **__) -> bool:
    """As `encodes`, for rows of whole groups and `channels` (scales, or marks) with an entry for
    each value of a row.
    """
    return encodes(x, group=group) and channels.shape == x.shape[-1:] and x.shape[-1] % group == 0


def decodes_by(codes, *arrays, width: int, dtype: str) -> bool:
    channels, group = arrays[-1], 2 * codes.shape[-1]
    return (
        decodes(codes, width=width, dtype=dtype)
        and channels.shape == (width,)
        and width % group == 0
    )


def decodes_with(codes, scales, values, slots, *, width: int, dtype: str) -> bool:
    return decodes_by(codes, slots, width=width, dtype=dtype) and 0 < values.shape[-1] <= MOST_SLOTS


def never(*_, **__) -> bool:
    """Takes no array: GPUs run the references of masks. XLA fuses the unpacking of a mask with the
    operation that uses the mask, and writes no unpacked mask. A Triton kernel that packed masks
    took 1.22 of the reference's time at 2^24 values, and 1.18 at 2^28, on an H200
    (`benchmarks/results/gpu_check/codecs_one_call.json`).
    """
    return False
