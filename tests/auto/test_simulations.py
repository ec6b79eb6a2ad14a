"""Loops over time without matrix products: the steps of a simulation through which a gradient runs,
alone and beside layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import jaxmem
from jaxmem._core.groups import span_of
from jaxmem.errors import NoLayersError
from tests.auto.steps import NOTHING, layers_of, update
from tests.shared.programs import nbytes

SIZE, STEPS, WINDOW = 32, 64, 8
CONDUCTIVITY = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
SOURCES = jax.random.normal(jax.random.key(1), (STEPS, SIZE))


def neighbours(u):
    return sum(jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1)) - 4 * u


def heat(conductivity, sources):
    """The heat equation by explicit steps; the heat sources of each step are a slice."""

    def step(u, source):
        u = jnp.tanh(u + 0.2 * jax.nn.sigmoid(conductivity) * neighbours(u))
        return u.at[SIZE // 2].add(source), u[0]

    u, borders = jax.lax.scan(step, jnp.cos(conductivity), sources)
    return (u**2).sum() + (borders**2).sum()


def waves(speed, sources):
    """A wave equation in a `fori_loop` that carries two arrays."""

    def step(i, state):
        now, before = state
        later = 2 * now - before + 0.1 * jax.nn.sigmoid(speed) * neighbours(now)
        return later / (1 + later**2), now

    first = sources[:SIZE] * speed
    return (jax.lax.fori_loop(0, STEPS, step, (first, first))[0] ** 2).sum()


def windows(conductivity, sources):
    """Windows of steps, each with a mean."""

    def step(u, source):
        return jnp.tanh(u + 0.2 * conductivity * neighbours(u)).at[0].add(source), None

    def window(u, sources):
        u, _ = jax.lax.scan(step, u, sources)
        return u, u.mean()

    sources = sources.reshape(-1, WINDOW, SIZE)
    u, means = jax.lax.scan(window, jnp.cos(conductivity), sources)
    return (u**2).sum() + (means**2).sum()


def network_and_heat(params, sources):
    """A simulation of what layers compute."""

    def layer(x, weights):
        return x + jnp.tanh(x @ weights), None

    first, weights = params
    return heat(jax.lax.scan(layer, first, weights)[0], sources)


def training(loss):
    return lambda params, sources: update(params, jax.grad(loss)(params, sources))


def plain_bytes(step, *args) -> int:
    return nbytes(jax.jit(step, donate_argnums=0).lower(*args).compile())


@pytest.mark.parametrize(
    ("loss", "turns"), [(heat, STEPS), (waves, STEPS), (windows, STEPS // WINDOW)]
)
def test_steps_in_time_are_layers(loss, turns):
    (layer,) = layers_of(loss, CONDUCTIVITY, SOURCES)
    assert layer.turns == turns


def test_steps_in_time_are_layers_beside_layers():
    weights = jax.random.normal(jax.random.key(2), (3, SIZE, SIZE)) / SIZE**0.5
    layers, steps = layers_of(network_and_heat, (CONDUCTIVITY, weights), SOURCES)
    assert (layers.turns, steps.turns) == (3, STEPS)


def test_few_steps_in_time_are_no_layers_beside_larger_layers():
    weights = jax.random.normal(jax.random.key(2), (3, SIZE, SIZE))
    given = jnp.ones((STEPS * SIZE, SIZE)), weights

    def loss(params, sources):
        x, weights = params
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)
        return heat(x[:SIZE], sources[:2])

    (layer,) = layers_of(loss, given, SOURCES)
    assert layer.turns == 3


@pytest.mark.parametrize("loss", [pytest.param(heat, marks=pytest.mark.core), waves, windows])
def test_a_simulation_within_a_budget_computes_the_same(loss):
    step = training(loss)
    budget = int(0.3 * plain_bytes(step, CONDUCTIVITY, SOURCES))
    plan = jaxmem.plan(
        jaxmem.auto(step), CONDUCTIVITY, SOURCES, budget=budget, actions=jaxmem.plans.LOSSLESS
    )
    assert plan.compiled_bytes <= budget
    want = jax.jit(step)(CONDUCTIVITY, SOURCES)
    assert np.abs(want - CONDUCTIVITY).min() > 0
    got = plan.step(jnp.copy(CONDUCTIVITY), SOURCES)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_the_least_bytes_of_a_simulation_are_those_of_spans():
    """A checkpoint of each step saves the state of every step; spans save √STEPS of them, and the
    steps of one span at a time (Chen et al. 2016, section 4.1).
    """
    step = training(heat)
    scan = jax.lax.scan

    def by_hand(conductivity, sources):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "scan", lambda f, *args: scan(jax.checkpoint(f), *args))
            return step(conductivity, sources)

    budget = plain_bytes(by_hand, CONDUCTIVITY, SOURCES) // 2
    plan = jaxmem.plan(
        jaxmem.auto(step), CONDUCTIVITY, SOURCES, budget=budget, actions=jaxmem.plans.LOSSLESS
    )
    assert plan.compiled_bytes <= budget
    assert any(span_of(label) > 1 for label in plan.actions)


def test_steps_in_time_without_a_derivative_are_no_layers():
    """They may run on values that no gradient depends on."""
    opaque = Primitive("opaque")
    opaque.def_abstract_eval(lambda x: x)
    weights = jax.random.normal(jax.random.key(2), (3, SIZE, SIZE)) / SIZE**0.5

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)
        step = lambda u, _: (opaque.bind(jnp.tanh(u)), u)
        _, history = jax.lax.scan(step, jax.lax.stop_gradient(x), None, length=STEPS)
        return (x * history.mean()).mean()

    (layer,) = layers_of(loss, weights, CONDUCTIVITY)
    assert layer.turns == 3


def test_loops_that_call_python_in_order_are_no_layers():
    def loss(weights, x):
        def layer(x, w):
            factor = jax.experimental.io_callback(
                lambda: np.float64(1.5), jax.ShapeDtypeStruct((), x.dtype), ordered=True
            )
            return jnp.tanh(x @ w) * jax.lax.stop_gradient(factor), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    weights = jax.random.normal(jax.random.key(2), (3, SIZE, SIZE))
    assert not layers_of(loss, weights, CONDUCTIVITY)
    with pytest.raises(NoLayersError, match="io_callback"):
        jax.grad(jaxmem.auto(loss, NOTHING))(weights, CONDUCTIVITY)
