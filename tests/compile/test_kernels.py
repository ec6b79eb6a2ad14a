"""What Pallas kernels of a trace compute."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem._target.hlo.kernels import kernel_flops
from tests.trace.test_flops import COLUMNS, DEPTH, ROWS, W, X, multiplied

pytestmark = pytest.mark.core


def test_kernels_are_found_by_their_shapes_wherever_they_are():
    """Of two with equal shapes the dearer one counts: compiled programs do not tell them apart."""

    def twice(x, w):
        again = jax.lax.scan(lambda x, _: (x, multiplied(16)(x, w)), x, length=2)[1]
        return multiplied(ROWS)(x, w), again

    (found,) = kernel_flops(jax.make_jaxpr(twice)(X, W).jaxpr)
    assert found == ((X.shape, W.shape), ((ROWS, COLUMNS),), 2 * ROWS * DEPTH * COLUMNS)
    assert kernel_flops(jax.make_jaxpr(jnp.matmul)(X, W).jaxpr) == []
