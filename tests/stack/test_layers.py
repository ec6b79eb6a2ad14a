"""Layers for the stack: parameters stacked and taken apart, linen and NNX modules, and modules that
change.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem import layers
from tests.shared.refused import refused

L, B, D = 3, 2, 4
X = np.linspace(-1.0, 1.0, B * D, dtype=np.float32).reshape(B, D)
KEY = jax.random.key(1)


class Linen(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, scale=1.0):
        y = jaxmem.tag(jnp.tanh(nn.Dense(D, name="dense")(x)), "y", kind="linear") * scale
        return x + nn.Dropout(self.rate, deterministic=not self.rate)(y)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros(()))
        count.value += 1
        return nn.Dense(D)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.dense = nnx.Linear(D, D, rngs=rngs)
        self.dropout = nnx.Dropout(rate, deterministic=not rate)

    def __call__(self, x, scale=1.0, rngs=None):
        y = jaxmem.tag(jnp.tanh(self.dense(x)), "y", kind="linear") * scale
        return x + self.dropout(y, rngs=rngs)


def linen_parameters(module):
    return [module.init(jax.random.key(i), X)["params"] for i in range(L)]


def gradients(block, params, each, *shared, key=None):
    """Of the stack, and of the layers one after the other by `each`, in float64."""
    floating = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    wide = lambda a: a.astype(jnp.float64) if floating(a) else a
    params, x = jax.tree.map(wide, params), wide(X)

    def mine(params, x):
        return (jaxmem.stack(block, params, x, *shared, key=key) ** 2).mean()

    def by_hand(params, x):
        for i, p in enumerate(layers.unstacked(params)):
            x = each(p, x, *shared, **({} if key is None else {"key": jax.random.fold_in(key, i)}))
        return (x**2).mean()

    return jax.grad(mine, (0, 1))(params, x), jax.grad(by_hand, (0, 1))(params, x)


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12), got, want)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_linen(rate):
    module = Linen(rate)
    params = layers.stacked(linen_parameters(Linen()))

    def each(p, x, scale, key=None):
        return module.apply({"params": p}, x, scale, rngs={} if key is None else {"dropout": key})

    close(*gradients(layers.linen(module), params, each, 2.0, key=KEY if rate else None))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_nnx(rate):
    graph, _ = nnx.split(Nnx(nnx.Rngs(0), rate))
    params = layers.stacked([nnx.split(Nnx(nnx.Rngs(i), rate))[1] for i in range(L)])

    def each(p, x, scale, key=None):
        return nnx.merge(graph, p)(x, scale, rngs=None if key is None else nnx.Rngs(key))

    close(*gradients(layers.nnx(graph), params, each, 2.0, key=KEY if rate else None))


def test_a_linen_module_that_changes_is_an_error():
    params = layers.stacked([Counting().init(jax.random.key(i), X)["params"] for i in range(L)])
    with pytest.raises(jaxmem.errors.StackError, match=r"Counting changes \['stats'\]\['count'\]"):
        jaxmem.stack(layers.linen(Counting()), params, X)


def test_an_nnx_module_that_changes_is_an_error():
    make = lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graph, state = nnx.split(make())
    params = layers.stacked([state] * L)
    with pytest.raises(jaxmem.errors.StackError, match="changes its .*count"):
        jaxmem.stack(layers.nnx(graph), params, X)


def test_stacked_and_unstacked():
    trees = [{"w": jnp.full((2,), i), "b": jnp.float32(i)} for i in range(3)]
    stacked = layers.stacked(trees)
    assert {k: v.shape for k, v in stacked.items()} == {"w": (3, 2), "b": (3,)}
    jax.tree.map(np.testing.assert_array_equal, layers.unstacked(stacked), trees)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([], "`layers` is empty"),
        (({"w": a} for a in "ab"), "`layers` is generator; expected a list"),
        ({"w": jnp.zeros(2)}, "`layers` is dict"),
        (jnp.zeros((2, 2)), "`layers` is ArrayImpl"),
        ([{"w": jnp.zeros(2)}, {"v": jnp.zeros(2)}], "layer 1 of `layers`"),
        (
            [{"w": jnp.zeros(2)}] * 2 + [{"w": jnp.zeros(3)}],
            r"layer 2 is .*\[3\].* layer 0 .*\[2\]",
        ),
        ([{"w": jnp.zeros(2)}, {"w": jnp.zeros(2, jnp.bfloat16)}], "layer 1 is bfloat16"),
    ],
)
def test_layers_that_differ(trees, message):
    with pytest.raises(jaxmem.errors.StackError, match=f"stacked: .*{message}"):
        layers.stacked(trees)


@refused(
    jaxmem.errors.StackError,
    ({}, "`params` holds no array"),
    (None, "`params` holds no array"),
    (jnp.zeros(()), r"`params` has shape \(\); expected a leading axis"),
    (
        {"a": jnp.arange(4), "b": jnp.arange(2)},
        r"`params\['b'\]` holds 2 layers, and `params\['a'\]` 4",
    ),
)
def test_trees_that_are_not_stacked(tree):
    layers.unstacked(tree)
