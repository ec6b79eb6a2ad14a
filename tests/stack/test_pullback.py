"""A pullback makes nothing before its cotangents are there: values, and memory of a released step
with tied embeddings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._model.loop.pullback import pulled
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.export import export_flat
from tests.shared import tiny_lm

pytestmark = pytest.mark.standard_promotion
rng = np.random.default_rng(0)


def embed(table, positions, numbers):
    x = jnp.asarray(table, jnp.float32)[numbers] + jnp.pad(positions, ((0, 0), (0, 3)))
    return x, {"first": jax.jit(lambda t: t[:1] * 2)(table)}


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
PULLED = {
    "an embedding": (embed, lambda: (rng.standard_normal((7, 5)), rng.standard_normal((4, 2)))),
    "no zeros": (jnp.tanh, lambda: (rng.standard_normal((3, 4)),)),
    "a rule of its own": (lambda x: twice(x)[2:3], lambda: (rng.standard_normal((3, 4)),)),
    "a slice of numbers": (lambda x: x[1], lambda: (rng.standard_normal(3),)),
}


@pytest.mark.parametrize("name", PULLED)
def test_it_is_what_the_pullback_makes(name):
    function, arguments = PULLED[name]
    given = [jnp.asarray(a, jnp.float32) for a in arguments()]
    if name == "an embedding":
        given.append(jnp.array([6, 1, 1, 0]))

    def both(*given):
        y, pull = jax.vjp(function, *given)
        cotangents = jax.tree.map(jnp.sin, y)
        return pulled(pull, cotangents), pull(cotangents)

    got, want = jax.jit(both)(*given)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b) if a.dtype != jax.dtypes.float0 else None


def test_what_an_embedding_recomputes_is_recomputed():
    """A checkpoint in it stays one: values as before, and its equation is there."""
    grow = jax.checkpoint(lambda table, n: jnp.tanh(table[n] @ table.T) @ table)
    table, numbers = jnp.asarray(rng.standard_normal((5, 3)), jnp.float32), jnp.array([1, 4])

    def both(table):
        y, pull = jax.vjp(lambda table: grow(table, numbers) + table[numbers], table)
        return pulled(pull, jnp.cos(y)), pull(jnp.cos(y))

    np.testing.assert_array_equal(*jax.jit(both)(table))
    with todays_checkpoint():
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(both)(table).eqns]
    assert sum(name.startswith(("remat", "checkpoint")) for name in names) == 2


def test_an_embeddings_gradient_is_not_held_through_the_layers_backward():
    """That of the head is there; the other's zeros wait until the layers are done."""
    width, vocab, sequence, batch = 256, 8191, 128, 16
    step = tiny_lm.released(jaxmem.adama(0.1, accumulation_steps=2))
    params = jax.eval_shape(lambda: tiny_lm.parameters(np.float32, 4, width, vocab))
    state = jax.eval_shape(step.init, params)
    tokens = jax.ShapeDtypeStruct((batch, sequence + 1), jnp.int32)
    exported, donated = export_flat(jax.jit(step, donate_argnums=0).trace(state, tokens), "cuda")
    with Compiler("h200", workers=1) as compiler:
        _, peak = compiler.explain(exported, donated=donated)
    inner = [point for point, (_, loops) in enumerate(peak.points) if len(loops) > 1]
    last = [p for p in inner if peak.points[p][1] == peak.points[inner[-1]][1]]
    assert any("transpose" in peak.points[p][0] for p in last), "not the layers' backward"
    lives = [life for life in peak.lives if life.held.shape == (vocab, width)]
    assert lives, "the embedding's gradient is nowhere"
    assert not [life for life in lives if life.first <= last[-1] and life.last >= last[0]]
