"""`jaxmem.auto` on a mesh with explicit axes, as `jax.make_mesh` makes them: part of a layer may
be under the same mesh with automatic axes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.plans import Assignment
from tests.auto.steps import scanned, unrolled
from tests.shared.compare import nonzero

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_cache")]

LAYERS, ROWS, WIDTH, HEADS = 3, 16, 8, 2
SHAPES = {
    "q": ((LAYERS, WIDTH, HEADS, WIDTH), P(None, None, "tp", None)),
    "o": ((LAYERS, HEADS, WIDTH, WIDTH), P(None, "tp", None, None)),
    "up": ((LAYERS, WIDTH, 4 * WIDTH), P(None, None, "tp")),
    "down": ((LAYERS, 4 * WIDTH, WIDTH), P(None, "tp", None)),
}


def layer(x, p):
    """Tensor parallel. JAX multiplies three arrays under automatic axes."""
    q = jnp.einsum("rd,dhe->rhe", x, p["q"])
    weights = jax.nn.softmax(jnp.einsum("rhe,she->hrs", q, q))
    whole = P(None, None)
    x = x + jnp.einsum("hrs,she,hed->rd", weights, q, p["o"], out_sharding=whole)
    return x + jnp.einsum("rf,fd->rd", jax.nn.gelu(x @ p["up"]), p["down"], out_sharding=whole)


LOSSES = {
    "scanned": functools.partial(scanned, layer=layer),
    "unrolled": functools.partial(unrolled, layers=[layer] * LAYERS),
}


@pytest.mark.quick("scanned")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_are_the_models_own_and_a_step_is_planned(loss):
    mesh, random = jax.make_mesh((1,), ("tp",)), np.random.default_rng(0)

    def made(shape, spec):
        array = random.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        return jax.device_put(array, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        params, x = {n: made(*s) for n, s in SHAPES.items()}, made((ROWS, WIDTH), P())
        want = jax.jit(jax.grad(loss))(params, x)
        for plan in (Assignment.nothing(), Assignment.everything()):
            got = jax.jit(jax.grad(jaxmem.auto(loss, plan)))(params, x)
            nonzero(got, want, 1e-4, 1e-6)
        step = lambda params, x: jax.grad(loss)(params, x)
        plan = jaxmem.plan(jaxmem.auto(step), params, x)
        assert {"softmax", "gelu"} <= {row.kind for row in plan.rows}
        jax.tree.map(lambda a: a.block_until_ready(), plan.step(params, x))
