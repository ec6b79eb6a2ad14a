"""How near a stack's gradients are to those of a scan over checkpointed layers, in the float32 that
a user has; and which derivatives it takes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment

pytestmark = pytest.mark.jax_defaults
PLANS = {
    "everything": None,
    "nothing": Assignment.nothing(),
    "keep": Assignment({"block": {"up": "keep"}}),
}


def block(p, x):
    return x + jaxmem.tag(jax.nn.gelu(jaxmem.tag(x @ p["up"], "up")), "act") @ p["down"]


def arguments():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.float32)
    return {"up": make(3, 32, 32), "down": make(3, 32, 32)}, make(2, 17, 32)


def scan(block, plan):
    layer = jax.checkpoint(block, policy=jaxmem.remat_policy(plan), prevent_cse=False)
    run = lambda p, x, *shared: jax.lax.scan(lambda x, p: (layer(p, x, *shared), None), x, p)[0]
    return lambda *args: (run(*args) ** 2).mean()


def stack(block, plan):
    return lambda *args: (jaxmem.stack(block, *args, plan=plan) ** 2).mean()


def gradients(loss, args):
    return jax.tree.leaves(jax.jit(jax.grad(loss, tuple(range(len(args)))))(*args))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_without_shared_arrays_gradients_are_the_scans_bit_for_bit(plan):
    args = arguments()
    want = gradients(scan(block, plan), args)
    for got, wanted in zip(gradients(stack(block, plan), args), want, strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert np.abs(wanted).min() > 0


def test_forward_mode_is_refused_and_derivatives_of_gradients_are_not():
    p, x = arguments()
    loss = lambda make: lambda x: make(block, None)(p, x)
    for derivative in (
        lambda: jax.jvp(loss(stack), (x,), (x,)),
        lambda: jax.jacfwd(loss(stack))(x),
    ):
        with pytest.raises(TypeError, match="forward-mode autodiff .* custom_vjp"):
            derivative()
    product = lambda make: jax.jvp(jax.grad(loss(make)), (x,), (x,))[1]
    want = product(scan)
    np.testing.assert_allclose(product(stack), want, rtol=1e-4, atol=1e-6 * np.abs(want).max())
    assert np.abs(want).max() > 0
