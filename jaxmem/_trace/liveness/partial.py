"""Estimates the partial sums of matrix products that XLA:GPU divides along the contracted axis."""

import math

MOST = 2 * 2**20  # elements of all partial sums of a product, on an H200
LEAST = 2**18  # bytes, below which an estimate is not changed


def partial_sums(product) -> int:
    """Returns the bytes of a product's partial sums, float32; 0 where XLA does not divide it,
    or where they are few.

    XLA:GPU divides a long contraction whose result is too small to occupy the device, and adds the
    parts in a second kernel. The rule is fitted to what jax 0.10.2 and 0.11.2 do for an H200, to a
    factor of 2 in the number of parts. Smaller GPUs get fewer parts.

    product: the `dot_general` equation.
    """
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    shape, result = product.invars[0].aval.shape, math.prod(product.outvars[0].aval.shape)
    length = math.prod(shape[axis] for axis in contracted)
    if batch or not result or not length:
        return 0
    parts = min(math.isqrt(length) // 2, MOST // result)
    found = 4 * result * 2 ** (parts.bit_length() - 1) if parts > 1 else 0
    return found if found >= LEAST else 0
