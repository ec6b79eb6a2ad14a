"""JAX's own backward of a scan folds each layer's gradient into a `jax.Ref`, with the bits and the
bytes of `jaxmem.stack`'s backward. So the stack's loops can be replaced by JAX's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.export import export_flat
from jaxmem.plans import Assignment

pytestmark = pytest.mark.jax_defaults
LAYERS, BATCH, WIDTH = 12, 64, 128
FIRST, SECOND = np.float32(0.9), np.float32(0.99)  # decay rates


def layer(p, x):
    return x + jnp.tanh(jaxmem.tag(x @ p["up"], "up")) @ p["down"]


def fold(moments, gradient):
    first, second = moments
    keep = lambda rate, old, new: jnp.asarray(rate) * old + (1 - rate) * new
    return (
        jax.tree.map(lambda m, g: keep(FIRST, m, g), first, gradient),
        jax.tree.map(lambda v, g: keep(SECOND, v, g * g), second, gradient),
    )


def by_stack(moments, params, x):
    def loss(moments):
        y = jaxmem.stack(layer, params, x, plan=Assignment.nothing(), moments=moments, fold=fold)
        return (y**2).mean()

    return jax.grad(loss)(moments)


@jax.custom_vjp
def folds(p, token, references, i):
    """The parameters of layer `i`. The backward folds their gradient into the references. It runs
    because the loss is differentiated by `token`; the parameters have no gradient.
    """
    return p


def _forward(p, token, references, i):
    return p, (references, i)


def _backward(residuals, gradient):
    references, i = residuals
    of_one = lambda tree: jax.tree.map(lambda a: a[None], tree)  # as the stack: updated in place
    moments = jax.tree.map(lambda ref: ref[i], references)
    new = jax.vmap(fold)(of_one(moments), of_one(jax.lax.optimization_barrier(gradient)))

    def put(ref, a):
        ref[i] = a[0]

    jax.tree.map(put, references, new)
    nothing = jax.tree.map(lambda ref: None, references)
    return jax.tree.map(jnp.zeros_like, gradient), jnp.zeros(()), nothing, None


folds.defvjp(_forward, _backward)


def by_references(moments, params, x):
    references = jax.tree.map(jax.new_ref, moments)
    policy = jaxmem.remat_policy(Assignment.nothing())
    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def loss(token):
        def body(x, of_layer):
            p, i = of_layer
            return block(folds(p, token, references, i), x), None

        return (jax.lax.scan(body, x, (params, jnp.arange(LAYERS)))[0] ** 2).mean()

    jax.grad(loss)(jnp.zeros(()))
    return jax.tree.map(jax.freeze, references)


def arguments():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / WIDTH**0.5, jnp.float32)
    params = {"up": make(LAYERS, WIDTH, 4 * WIDTH), "down": make(LAYERS, 4 * WIDTH, WIDTH)}
    moments = jax.tree.map(lambda a: a / 10, params), jax.tree.map(lambda a: a * a, params)
    return moments, params, make(BATCH, WIDTH)


def test_moments_are_those_of_the_stack_bit_for_bit(optimized):
    stacked, referred = (jax.jit(step)(*arguments()) for step in (by_stack, by_references))
    for got, want, old in zip(*map(jax.tree.leaves, (referred, stacked, arguments()[0]))):
        np.testing.assert_array_equal(got, want)
        assert (np.asarray(want) != np.asarray(old)).mean() > 0.99


def test_a_gpu_stores_no_more_than_for_the_stack():
    shapes = jax.eval_shape(arguments)
    gradients = sum(4 * a.size for a in jax.tree.leaves(shapes[1]))
    nbytes = []
    with Compiler("h200", workers=1) as compiler:
        for step in (by_stack, by_references):
            traced = jax.jit(step, donate_argnums=0).trace(*shapes)
            exported, donated = export_flat(traced, "cuda")
            nbytes.append(compiler.explain(exported, donated=donated)[0].total_bytes)
    assert nbytes[1] == pytest.approx(nbytes[0], rel=0.005)
    arguments_bytes = sum(4 * a.size for a in jax.tree.leaves(shapes))
    assert nbytes[1] < arguments_bytes + gradients / 2, "the gradients are never there at once"


def test_a_reference_forgets_the_memory_of_its_array():
    """Therefore states that stream from host memory cannot be references. When this fails, they
    can be tried.
    """

    def read(x):
        return jax.new_ref(jax.device_put(x, jax.memory.Space.Host))[...]

    assert "<host>" not in str(jax.make_jaxpr(read)(jnp.ones(3)).out_avals[0])
