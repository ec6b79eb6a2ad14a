"""Steps that differentiate the gradient of a loss: codes have no derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import TagError
from tests.shared.programs import nbytes

LAYERS, WIDTH, ROWS = 4, 16, 128


def loss(params, x):
    def layer(x, p):
        up, down = p
        return x + jax.nn.gelu(x @ up) @ down, None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


def newton(params, direction, x):
    """A step against the gradient and the Hessian-vector product."""
    gradient = jax.grad(lambda params: loss(params, x))
    gradients, products = jax.jvp(gradient, (params,), (direction,))
    return jax.tree.map(lambda p, g, h: p - 0.1 * (g + 0.1 * h), params, gradients, products)


def drawn(seed: int, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / WIDTH**0.5


@pytest.mark.core
def test_codecs_are_left_out_by_default_and_refused_on_request():
    shapes = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
    params = tuple(drawn(i, *shape) for i, shape in enumerate(shapes))
    args = (
        params,
        tuple(drawn(i + 2, *shape) for i, shape in enumerate(shapes)),
        drawn(4, ROWS, WIDTH),
    )
    plain = jax.jit(newton, donate_argnums=0).lower(*args).compile()
    step, budget = jaxmem.auto(newton), nbytes(plain) // 2
    plan = jaxmem.plan(step, *args, budget=budget)
    assert plan.compiled_bytes <= budget
    assert not plan.lossy
    assert any("codecs are left out" in note for note in plan.notes)
    got, want = plan.step(jax.tree.map(jnp.copy, params), *args[1:]), jax.jit(newton)(*args)
    for a, b, p in zip(got, want, params, strict=True):
        assert np.abs(b - p).min() > 0
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    with pytest.raises(TagError, match="gradient of a gradient"):
        jaxmem.plan(step, *args, budget=budget, actions="all")
