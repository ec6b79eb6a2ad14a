"""Partial sums of products that XLA:GPU divides along the contracted axis."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.liveness.kernels import partial_sums
from tests.shared.deviceless import result, spec

pytestmark = pytest.mark.jax_defaults


def estimated(function, *shapes):
    (product,) = jax.make_jaxpr(function)(*shapes).eqns
    return partial_sums(product)


def test_partial_sums_are_those_of_an_h200_to_a_factor_of_two():
    multiply = lambda a, b: jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())))
    with Compiler("h200", workers=2) as compiler:
        for m, n, k in ((128, 256, 512), (512, 512, 4096), (2048, 1024, 512)):
            shapes = spec(k, m), spec(k, n)
            found = estimated(multiply, *shapes)
            temporary = result(compiler, multiply, *shapes).temp_bytes
            assert found / 2 <= temporary <= max(2 * found, 2**16), (m, n, k)


def test_small_and_batched_products_have_none():
    assert estimated(jnp.matmul, spec(8, 1024), spec(1024, 8)) == 0
    assert (
        estimated(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), spec(4, 64, 512), spec(4, 512, 64))
        == 0
    )
