"""One bit a value: eight contiguous parts of a row share its bytes."""

import functools
import operator

import jax.numpy as jnp
import numpy as np


def pack_bits(b):
    """bool (R, 8, H) to uint8 (R, H): part i in bit i."""
    return functools.reduce(operator.or_, (b[:, i].astype(jnp.uint8) << i for i in range(8)))


def unpack_bits(packed):
    """The inverse of `pack_bits`."""
    return ((packed[:, None, :] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1) != 0
