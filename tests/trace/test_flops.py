"""FLOPs of matrix products that a trace counts, also inside Pallas kernels."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxmem._target.hlo.kernels import kernel_flops
from jaxmem._trace.jaxpr import matmul_flops

ROWS, DEPTH, COLUMNS = 256, 64, 128
X = jnp.zeros((ROWS, DEPTH), jnp.float32)
W = jnp.zeros((DEPTH, COLUMNS), jnp.float32)


def of(function, *args) -> tuple[float, int]:
    counts = [matmul_flops(eqn) for eqn in jax.make_jaxpr(function)(*args).eqns]
    return sum(f for f, _ in counts), sum(n for _, n in counts)


def test_those_of_a_product():
    assert of(jnp.matmul, X, W) == (2 * ROWS * DEPTH * COLUMNS, 1)


def test_those_of_a_loop_count_for_every_turn():
    square = jnp.zeros((DEPTH, DEPTH), jnp.float32)
    looped = lambda x: jax.lax.scan(lambda x, _: (x @ square, None), x, length=5)[0]
    assert of(looped, X) == (5 * 2 * ROWS * DEPTH * DEPTH, 5)


def test_those_of_a_conditional_are_its_dearest_branch():
    wide = jnp.zeros((DEPTH, 2 * COLUMNS), jnp.float32)
    branches = (lambda x: (x @ W).sum(), lambda x: (x @ wide).sum(), jnp.sum)
    either = lambda x: jax.lax.switch(jnp.int32(x[0, 0]), branches, x)
    assert of(either, X) == (2 * ROWS * DEPTH * 2 * COLUMNS, 1)


def multiplied(rows: int):
    """A product of X and W by a kernel, of so many of its rows in each step of its grid."""

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    half = COLUMNS // 2
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        grid=(ROWS // rows, 2),
        in_specs=[
            pl.BlockSpec((rows, DEPTH), lambda i, j: (i, 0)),
            pl.BlockSpec((DEPTH, half), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((rows, half), lambda i, j: (i, j)),
    )


def test_those_of_a_pallas_kernel_count_for_every_step_of_its_grid():
    assert of(multiplied(ROWS // 4), X, W) == (2 * ROWS * DEPTH * COLUMNS, 8)


def test_kernels_are_found_by_their_shapes_wherever_they_are():
    """Of two with equal shapes the dearer one counts: compiled programs do not tell them apart."""

    def twice(x, w):
        again = jax.lax.scan(lambda x, _: (x, multiplied(16)(x, w)), x, length=2)[1]
        return multiplied(ROWS)(x, w), again

    (found,) = kernel_flops(jax.make_jaxpr(twice)(X, W).jaxpr)
    assert found == ((X.shape, W.shape), ((ROWS, COLUMNS),), 2 * ROWS * DEPTH * COLUMNS)
    assert kernel_flops(jax.make_jaxpr(jnp.matmul)(X, W).jaxpr) == []
