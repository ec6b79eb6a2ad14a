"""Layers under no checkpoint beside others under one: taken where XLA does not call the step slower
for it.
"""

import concurrent.futures

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._xla.backend import Local

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compiles", "own_database")]
LAYERS, WIDTH = 6, 64
KEPT = "these layers are kept as they are"


def layer(x, w):
    h = x @ w["up"]
    for _ in range(3):  # cheap work, of which every value is read by the derivative
        h = jnp.sin(h) * h
    return x + h @ w["down"], None


def step(w, x):
    loss = lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).mean()
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))


def planned(share: float):
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    w = {"up": shape(LAYERS, WIDTH, 4 * WIDTH), "down": shape(LAYERS, 4 * WIDTH, WIDTH)}
    args, build = (w, shape(1024, WIDTH)), jaxmem.auto(step)
    whole = jaxmem.plan(build, *args, budget=10**12)
    return jaxmem.plan(build, *args, budget=int(share * whole.baseline_bytes), fresh=True)


@pytest.fixture
def told(monkeypatch):
    """What XLA is made to say of steps, in the order in which it is asked."""
    seconds: list[float | None] = []

    def step_seconds(self, traced):
        done = concurrent.futures.Future()
        done.set_result(seconds.pop(0))
        return done

    monkeypatch.setattr(Local, "step_seconds", step_seconds)
    return seconds


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [((1.0, 2.0), True), ((2.0, 1.0), False), ((None, 1.0), True)],
    ids=["faster", "slower", "unknown"],
)
def test_it_is_taken_unless_xla_calls_it_slower(told, seconds, taken):
    told += seconds
    plan = planned(0.85)
    assert told == [], "it was asked of the plan with such layers, and of the best without"
    assert (KEPT in str(plan)) is taken
    assert plan.compiled_bytes <= plan.budget_bytes


def test_nothing_is_asked_of_a_plan_without_such_layers(told):
    plan = planned(0.3)
    assert KEPT not in str(plan)
