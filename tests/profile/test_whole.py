"""Pieces of a step are those of one device, whatever the step says of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem._cost.profile.whole import whole
from jaxmem._trace.jaxpr import as_function, equations

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]

P, DEVICES, WIDTH = PartitionSpec, 2, 8
PARAMS = {"up": (3, WIDTH, 4 * WIDTH), "down": (3, 4 * WIDTH, WIDTH)}
X = (4, WIDTH)
SPECS = {"up": P(None, None, "model"), "down": P(None, "model", None)}


def step(params, x, constrained):
    """Tensor parallel layers, whose sums say where they lie."""

    def layer(x, p):
        hidden = constrained(jnp.tanh(x @ p["up"]), P(None, "model"))
        hidden = jnp.where(hidden > 0, hidden, jnp.zeros_like(hidden))
        summed = constrained.product(hidden, p["down"])
        summed += jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), summed.shape)
        return x + jax.lax.cond(summed.sum() > 0, jnp.sin, jnp.cos, summed)

    def loss(params):
        run = jax.checkpoint(layer)
        last, _ = jax.lax.scan(lambda x, p: (run(x, p), None), x, params)
        return (jax.jit(jnp.square)(last).reshape(-1) * jnp.arange(4.0 * WIDTH)).mean()

    return jax.grad(loss)(params)


class Plain:
    def product(self, hidden, down):
        return hidden @ down

    def __call__(self, x, spec):
        return x


class Automatic(Plain):
    mesh = AbstractMesh((DEVICES,), ("model",), axis_types=(AxisType.Auto,))

    def __call__(self, x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


class Explicit(Plain):
    mesh = AbstractMesh((DEVICES,), ("model",), axis_types=(AxisType.Explicit,))

    def product(self, hidden, down):
        whole = NamedSharding(self.mesh, P(None, None))
        return jnp.einsum("rf,fd->rd", hidden, down, out_sharding=whole)

    def __call__(self, x, spec):
        return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))


def traced(how):
    def shape(sizes, spec):
        sharding = NamedSharding(how.mesh, spec) if hasattr(how, "mesh") else None
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)

    params = {name: shape(PARAMS[name], SPECS[name]) for name in PARAMS}
    return jax.make_jaxpr(lambda p, x: step(p, x, how))(params, shape(X, P()))


def says_nothing(jaxpr) -> bool:
    values = [v for eqn in equations(jaxpr) for v in (*eqn.invars, *eqn.outvars)]
    typed = [v for v in values if not v.aval.sharding.mesh.empty]
    said = [eqn for eqn in equations(jaxpr) if "reshard" in eqn.primitive.name]
    said += [eqn for eqn in equations(jaxpr) if "constraint" in eqn.primitive.name]
    said += [
        eqn
        for eqn in equations(jaxpr)
        for name, value in eqn.params.items()
        if isinstance(value, NamedSharding) and "sharding" in name
    ]
    return not typed and not said


@pytest.mark.parametrize("how", [Automatic(), Explicit()])
def test_it_is_what_one_device_computes(how):
    divided, alone = traced(how), traced(Plain())
    assert not says_nothing(divided.jaxpr)
    plain = whole(divided)
    assert says_nothing(plain.jaxpr)
    random = np.random.default_rng(0)
    arrays = [
        jnp.asarray(random.standard_normal(v.aval.shape), jnp.float32) for v in alone.jaxpr.invars
    ]
    for got, want in zip(as_function(plain)(*arrays), as_function(alone)(*arrays), strict=True):
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.jit(as_function(plain)).lower(*arrays).compile()
    # what was traced is as it was
    assert not says_nothing(divided.jaxpr)


def test_a_program_that_says_nothing_is_the_same():
    alone = traced(Plain())
    assert str(whole(alone)) == str(alone)
