"""Checks the arguments of operations, before XLA or Triton would refuse them with a worse message.

`op` is the operation's name in messages. `parts` is the number of values that share a byte.
"""

import jax.numpy as jnp

SCALES = "bfloat16", "float32"
FLOATS = ("bfloat16", "float16", "float32", "float64")


def tensor(op: str, x) -> None:
    """Raises TypeError unless `x` is floating, ValueError unless it has an axis for groups."""
    if x.dtype.name not in FLOATS:
        raise TypeError(
            f"{op}: `x` is {x.dtype.name} {tuple(x.shape)}; expected one of {', '.join(FLOATS)}:"
            " pack_bits takes bool and tensors of two values; do not encode other integers"
        )
    if not x.ndim:
        raise ValueError(
            f"{op}: `x` has no axis; expected at least one, the axis of groups: reshape it to (1,)"
        )


def group(op: str, size: int, parts: int) -> None:
    """Raises ValueError unless a group of `size` values has `parts` equal parts."""
    if isinstance(size, bool) or not isinstance(size, int) or size < parts or size % parts:
        raise ValueError(
            f"{op}: `group` is {size!r}; expected a multiple of {parts}, since {parts} parts of a"
            " group share bytes"
        )


def scale(op: str, dtype) -> None:
    """Raises ValueError unless scales can have this dtype."""
    if (name := jnp.dtype(dtype).name) not in SCALES:
        raise ValueError(f"{op}: `scale` is {name}; expected {' or '.join(SCALES)}")


def seed(op: str, value) -> None:
    """Raises ValueError unless `value` can be hashed: an integer of 32 bits, not below 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"{op}: `seed` is {value!r}; expected an integer from 0 to {2**32 - 1}")


def packed(op: str, codes, width: int, parts: int) -> None:
    """Raises ValueError unless `codes` are uint8 (*lead, K, H), for rows of `width` values."""
    if codes.ndim < 2 or codes.dtype != jnp.uint8:
        raise ValueError(
            f"{op}: `packed` is {codes.dtype.name} {tuple(codes.shape)}; expected uint8 (...,"
            " groups, bytes)"
        )
    size = parts * codes.shape[-1]
    if size and codes.shape[-2] != -(-width // size):
        raise ValueError(
            f"{op}: `width` is {width}, and `packed` {tuple(codes.shape)} has {codes.shape[-2]}"
            f" groups of {size}; expected {-(-width // size)} groups: pass the encoded width"
        )


def channels(op: str, name: str, count: int, width: int) -> None:
    """Raises ValueError unless rows of `width` values are whole sets of `count` channels."""
    if not count or width % count:
        raise ValueError(
            f"{op}: `{name}` is of {count} channels, and rows are of {width} values; expected"
            f" {width} channels, or a divisor of {width}"
        )


def slots(op: str, index) -> None:
    """Raises TypeError unless `index` has the channel of each slot, int32 (slots,)."""
    if index.ndim != 1 or index.dtype != jnp.int32:
        raise TypeError(
            f"{op}: `index` is {index.dtype.name} {tuple(index.shape)}; expected int32 (slots,):"
            " the channel of each slot, and the number of channels for an empty slot"
        )
