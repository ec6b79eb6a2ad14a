"""Which values of a program are written to memory: small programs whose fusion is known. Partial
sums of products that XLA:GPU divides along the contracted axis.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.liveness.kernels import SLICED, kernels_of, partial_sums
from jaxmem._trace.rewrite import flatten
from tests.shared.deviceless import result, spec

pytestmark = pytest.mark.core
X, W = jnp.ones((8, 8), jnp.float32), jnp.ones((8, 8), jnp.float32)


def written(function, *args, on_gpu=True, sliced=0) -> list[str]:
    """The primitives whose results are written, in order."""
    flat = flatten(jax.make_jaxpr(function)(*args))
    return [k.primitive for k in kernels_of(flat, sliced, on_gpu).kernels]


def test_pointwise_operations_are_one_kernel():
    assert written(lambda x: jnp.sin(x * 2 + 1) - x, X) == ["sub"]


def test_products_read_from_memory_and_write_to_it():
    assert written(lambda x, w: ((x + 1) @ w) * 2, X, W) == ["add", "dot_general", "mul"]
    # a view lies where its operand lies
    assert written(lambda x, w: (x.T @ w).reshape(64), X, W) == ["dot_general"]


def test_what_is_dear_is_written_once_for_several_kernels():
    softmax = lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)
    once = lambda x: (y := jnp.exp(x)) / y.sum(-1, keepdims=True)
    assert written(once, X) == ["exp", "reduce_sum", "div"]
    # written twice by the user, it is computed twice
    assert written(softmax, X) == ["reduce_sum", "div"]
    # what is cheap is computed by each kernel that reads it
    cheap = lambda x: (y := x + 1) / y.sum(-1, keepdims=True)
    assert written(cheap, X) == ["reduce_sum", "div"]


def test_pointwise_kernels_of_one_dear_value_are_one():
    """A gelu's value and its derivative are computed together from the same tanh."""
    both = lambda x, w, v: ((t := jnp.tanh(x)) * 3 @ w, (1 - t * t) @ v)
    assert written(both, X, W, W) == ["mul", "dot_general", "sub", "dot_general"]
    # not where the second waits for the first
    waits = lambda x, w: (t := jnp.tanh(x)) * 3 @ w * (1 - t * t)
    assert written(waits, X, W) == ["tanh", "mul", "dot_general", "mul"]


def test_what_a_product_reads_of_a_stack_is_copied_out_of_it():
    assert written(lambda w, x: x @ w, X, W, sliced=1) == [SLICED, "dot_general"]
    assert written(lambda w, x: w + x, X, W, sliced=1) == ["add"]


def test_random_bits_are_made_by_a_loop_on_a_cpu():
    mask = lambda key: jax.random.bernoulli(key, 0.5, (8, 8)).astype(jnp.float32) @ W
    key = jax.random.key(0)
    assert "random_bits" in written(mask, key, on_gpu=False)
    assert "random_bits" not in written(mask, key, on_gpu=True)


def test_what_nothing_reads_is_no_kernel():
    def function(x):
        _ = x @ x
        return x + 1

    assert written(function, X) == ["add"]


def test_a_result_takes_the_memory_of_an_operand_of_its_shape_and_dtype():
    def overwrites(function, *args):
        body = kernels_of(flatten(jax.make_jaxpr(function)(*args)), 0, True)
        return [bool(k.overwrites) for k in body.kernels]

    assert overwrites(lambda x, w: x @ w + 1, X, W) == [False, True]
    assert overwrites(lambda x, w: (x @ w).astype(jnp.bfloat16), X, W) == [False, False]
    # products of a batch have another shape in XLA
    batched = lambda x: jnp.einsum("abij,abjk->abik", x, x) + 1
    assert overwrites(batched, jnp.ones((2, 2, 4, 4))) == [False, False]


def test_a_barrier_holds_back_what_is_read_behind_it():
    def function(x, late):
        y = late @ late
        x, _ = jax.lax.optimization_barrier((x, y))
        return x @ x + y

    body = kernels_of(flatten(jax.make_jaxpr(function)(X, W)), 0, True)
    barrier = next(k for k in body.kernels if k.primitive == "optimization_barrier")
    first, behind = (k for k in body.kernels if k.primitive == "dot_general")
    assert set(first.writes) <= set(barrier.reads)
    assert set(barrier.writes) <= set(behind.reads)


@pytest.mark.todays_checkpoint
def test_a_checkpoint_of_the_backward_waits_for_its_cotangents():
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    loss = lambda x, w: layer(layer(x, w), w).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss))(X, W)
    names = lambda barriers: [e.eqn.primitive.name for e in flatten(jaxpr, barriers=barriers).nodes]
    assert len(names(True)) == len(names(False)) + 2


def estimated(function, *shapes):
    (product,) = jax.make_jaxpr(function)(*shapes).eqns
    return partial_sums(product)


@pytest.mark.jax_defaults
def test_partial_sums_are_those_of_an_h200_to_a_factor_of_two():
    multiply = lambda a, b: jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())))
    with Compiler("h200", workers=2) as compiler:
        for m, n, k in ((128, 256, 512), (512, 512, 4096), (2048, 1024, 512)):
            shapes = spec(k, m), spec(k, n)
            found = estimated(multiply, *shapes)
            temporary = result(compiler, multiply, *shapes).temp_bytes
            assert found / 2 <= temporary <= max(2 * found, 2**16), (m, n, k)


@pytest.mark.jax_defaults
def test_small_and_batched_products_have_none():
    assert estimated(jnp.matmul, spec(8, 1024), spec(1024, 8)) == 0
    assert (
        estimated(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), spec(4, 64, 512), spec(4, 512, 64))
        == 0
    )
