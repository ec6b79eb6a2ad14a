"""Packs tensors of two values, one bit for each value: eight contiguous parts of a group share its
bytes. `layout` defines the shapes, with eight parts.
"""

import functools
import operator

import jax.numpy as jnp
import numpy as np

from jaxmem_kernels import checks
from jaxmem_kernels.layout import blocks, unblocked


def pack_bits(x, zero, *, group: int):
    """Packs whether each value of `x` (*lead, W) differs from the scalar `zero`, as uint8
    (*lead, K, H): part i of a group is in bit i of its bytes.
    """
    checks.group("pack_bits", group, 8)
    b = blocks(x != zero, group, 8)
    return functools.reduce(operator.or_, (b[..., i, :].astype(jnp.uint8) << i for i in range(8)))


def unpack_bits(packed, zero, one, *, width: int):
    """Returns (*lead, W) values, the scalar `one` where `pack_bits` set a bit and `zero` elsewhere.

    packed: uint8 (*lead, K, H).
    zero, one: scalars of the result's dtype.
    width: W, the number of values of a row.
    """
    checks.packed("unpack_bits", packed, width, 8)
    # (*lead, K, 8, H): bit i of a byte is a value of part i.
    bits = (packed[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return jnp.where(unblocked(bits, width) != 0, one, zero)
