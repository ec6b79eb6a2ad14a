"""`jaxmem.ops.name_residuals`: what a derivative rule saves is decided by a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import Action, Choice
from jaxmem._cost.profile.options import codecs_for
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._trace.jaxpr import equations
from jaxmem.errors import TagError
from jaxmem.ops import name_residuals
from jaxmem.plans import Assignment
from tests.tags.test_residuals import attention

pytestmark = pytest.mark.core

ROWS, WIDTH = 16, 8
Q, K, V = (jax.random.normal(jax.random.key(i), (ROWS, WIDTH), jnp.float32) for i in range(3))
FORWARD = 2  # products of the attention


def block(plan, call=None):
    call = call or name_residuals(attention, "attention")
    inside = lambda q, k, v: jnp.tanh(call(jnp.sin(q), jnp.sin(k), v))
    run = jax.checkpoint(inside, policy=jaxmem.remat_policy(plan))
    return lambda q, k, v: (run(q, k, v) ** 2).sum()


def products(plan, call=None) -> int:
    with todays_checkpoint():
        traced = jax.make_jaxpr(jax.grad(block(plan, call), argnums=(0, 1, 2)))(Q, K, V)
    return sum(e.primitive.name == "dot_general" for e in equations(traced.jaxpr))


def of(action: Action) -> Assignment:
    return Assignment({"block": {"attention": Choice(action)}})


def test_its_forward_does_not_run_again_where_they_are_kept():
    kept, recomputed = products(of(Action.KEEP)), products(of(Action.RECOMPUTE))
    assert recomputed - kept == FORWARD
    tagged = lambda q, k, v: jaxmem.tag(attention(q, k, v), "attention")
    assert products(of(Action.KEEP), tagged) == recomputed, "a tag behind it spares nothing"


@pytest.mark.parametrize("action", [Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD])
def test_gradients_are_those_of_the_function(action):
    own = lambda q, k, v: (jnp.tanh(attention(jnp.sin(q), jnp.sin(k), v)) ** 2).sum()
    want = jax.grad(own, argnums=(0, 1, 2))(Q, K, V)
    got = jax.jit(jax.grad(block(of(action)), argnums=(0, 1, 2)))(Q, K, V)
    for a, b in zip(got, want, strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_arguments_may_be_trees_and_whatever_is_no_array():
    scale = jnp.float32(0.5)  # closed over

    def f(tree, power, *, name):
        assert (power, name) == (2, "x")
        return {"y": jnp.exp(scale * tree["x"]) ** power, "n": tree["n"] + 1}

    named = name_residuals(f, "saved")
    tree = {"x": Q, "n": jnp.arange(3)}
    want, got = f(tree, 2, name="x"), named(tree, 2, name="x")
    jax.tree.map(np.testing.assert_array_equal, got, want)
    loss = lambda f: lambda x: f({"x": x, "n": tree["n"]}, 2, name="x")["y"].sum()
    np.testing.assert_allclose(jax.grad(loss(named))(Q), jax.grad(loss(f))(Q), rtol=1e-6)
    batched = jax.vmap(loss(named))(jnp.stack([Q, K]))
    np.testing.assert_allclose(batched, jax.vmap(loss(f))(jnp.stack([Q, K])), rtol=1e-6)


def test_a_planner_makes_no_codes_of_them():
    """Whatever codecs there are, unless they name the kind."""
    float32 = jnp.dtype(jnp.float32)
    assert codecs_for("exact", None, float32, None) == []
    assert codecs_for("exact", None, float32, "grouped_symmetric") == []
    assert codecs_for("exact", None, float32, {"exact": "grouped_symmetric"})
    for asked in (None, "grouped_symmetric"):
        assert [*map(str, codecs_for("exact", None, jnp.dtype(bool), asked))] == ["bit_mask()"]


@pytest.mark.parametrize("makes", ["mask", "index", "key"])
def test_it_may_close_over_what_is_traced_and_not_floating(makes):
    """As a kernel that is made inside the layer closes over its mask."""

    def inner(x, call):
        made = {
            "mask": jnp.tril(jnp.ones((ROWS, WIDTH), bool)),
            "index": jnp.cumsum(jnp.ones(ROWS, jnp.int32)) - 1,
            "key": jax.random.fold_in(jax.random.key(0), jnp.int32(x[0, 0] > 0)),
        }[makes]

        def f(x):
            if makes == "mask":
                return jnp.where(made, jnp.tanh(x), 0.1 * x)
            if makes == "index":
                return jnp.tanh(x[made])
            return jnp.tanh(x) * jax.random.normal(made, x.shape, x.dtype)

        return call(f)(jnp.sin(x))

    def loss(x, call):
        return (jax.checkpoint(lambda x: inner(x, call))(x) ** 2).sum()

    got = jax.jit(jax.grad(lambda x: loss(x, lambda f: name_residuals(f, "n"))))(Q)
    want = jax.grad(lambda x: loss(x, lambda f: f))(Q)
    assert np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["", "*", None, 3])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(TagError, match="name_residuals: `name` is"):
        name_residuals(attention, name)
