"""Which arrays a kernel takes; the rest goes to the reference, as XLA compiles it."""

import math

import jax.numpy as jnp

FLOATS = ("bfloat16", "float16", "float32")
INTEGERS = "int8", "uint8", "int16", "uint16", "int32", "uint32"
# a thread has 16 bytes of neighbours, a program a few thousand values
GROUPS = tuple(2**i for i in range(4, 14))
# A launch takes a few microseconds, in which memory moves this much; and XLA fuses a reference with
# what is around it.
LEAST_SIZE = 2**16
MOST_SLOTS = 255


def _takes(shape, group: int, dtype, dtypes=FLOATS) -> bool:
    """Rows of whole groups; or a flat tensor, of which the last may lack values."""
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
    return _takes((*codes.shape[:-2], width), 2 * codes.shape[-1], dtype)


def encodes_by(x, channels, *, group: int, **__) -> bool:
    """With one of `channels` (scales, or marks) for each value of a row of whole groups."""
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
    """A mask is unpacked where it is used: XLA's fusion reads a bit a value, and writes none."""
    return False
