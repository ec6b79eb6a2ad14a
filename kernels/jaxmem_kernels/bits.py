"""One bit a value: eight contiguous parts of a group share its bytes. Shapes are those of
`layout`.
"""

import functools
import operator

import jax.numpy as jnp
import numpy as np

from jaxmem_kernels import checks
from jaxmem_kernels.layout import blocks, unblocked


def pack_bits(x, zero, *, group: int):
    """Whether each of `x` (*lead, W) differs from the scalar `zero`: uint8 (*lead, K, H), part i in
    bit i.
    """
    checks.group("pack_bits", group, 8)
    b = blocks(x != zero, group, 8)
    return functools.reduce(operator.or_, (b[..., i, :].astype(jnp.uint8) << i for i in range(8)))


def unpack_bits(packed, zero, one, *, width: int):
    """(*lead, W) of the scalars `zero` and `one`, by the bits that `pack_bits` made."""
    checks.packed("unpack_bits", packed, width, 8)
    bits = (packed[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return jnp.where(unblocked(bits, width) != 0, one, zero)
