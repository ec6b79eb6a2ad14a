"""Says which arrays a GPU's kernels take; all others go to the reference, as XLA compiles it.

Each public function here is the `takes` of a `dispatch.Kernel`: it is asked with the shapes and
dtypes of an operation's arrays, and with its parameters.
"""

import math

import jax.numpy as jnp

FLOATS = ("bfloat16", "float16", "float32")
INTEGERS = "int8", "uint8", "int16", "uint16", "int32", "uint32"
# 16 to 8192 values: a thread has 16 bytes of neighbours, a program a few thousand values.
GROUPS = tuple(2**i for i in range(4, 14))
# A launch takes a few microseconds, in which memory moves this much; and XLA fuses a reference with
# what is around it.
LEAST_SIZE = 2**16
MOST_SLOTS = 255  # a slot's number is a byte in the kernel, and 0 stands for none


def _takes(shape, group: int, dtype, dtypes=FLOATS) -> bool:
    """Whether these are rows of whole groups, or a flat tensor whose last group may be short."""
    # A dimension is no int where a program is exported for any batch.
    if (
        not all(isinstance(n, int) for n in shape)
        or math.prod(shape) < LEAST_SIZE
        or group not in GROUPS
    ):
        return False
    return jnp.dtype(dtype).name in dtypes and (shape[-1] % group == 0 or len(shape) == 1)


def encodes(x, *_, group: int, **__) -> bool:
    return _takes(x.shape, group, x.dtype)


def decodes(codes, *_, width: int, dtype: str) -> bool:
    # A group's codes are half as many bytes as it has values.
    return _takes((*codes.shape[:-2], width), 2 * codes.shape[-1], dtype)


def encodes_by(x, channels, *, group: int, **__) -> bool:
    """As `encodes`, and `channels` (scales, or marks) has one for each value of a row of whole
    groups.
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


def packs(x, _, *, group: int) -> bool:
    return _takes(x.shape, group, x.dtype, (*FLOATS, "bool", *INTEGERS))


def never(*_, **__) -> bool:
    """Takes no array: a mask is unpacked where it is used, since XLA's fusion then reads a bit a
    value and writes no unpacked mask.
    """
    return False
