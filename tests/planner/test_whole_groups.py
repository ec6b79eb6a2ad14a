"""Layers under no checkpoint beside others under one: taken where XLA does not call the step slower
for it.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._planner.search.trial import Trial

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
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
def xla_says(monkeypatch):
    """Makes XLA tell so many seconds of plans with such layers, and of all others."""

    def say(with_such: float | None, others: float | None):
        def seconds(trial):
            whole = [tags.get(UNTAGGED) == KEEP for tags in trial.actions.values()]
            return with_such if any(whole) and not all(whole) else others

        monkeypatch.setattr(Trial, "xla_seconds", property(seconds))

    return say


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [((1.0, 2.0), True), ((2.0, 1.0), False), ((None, None), True)],
    ids=["faster", "slower", "unknown"],
)
def test_it_is_taken_unless_xla_calls_it_slower(xla_says, seconds, taken):
    xla_says(*seconds)
    plan = planned(0.85)
    assert (KEPT in str(plan)) is taken
    assert plan.compiled_bytes <= plan.budget_bytes


def test_small_budgets_leave_no_room_for_such_layers():
    assert KEPT not in str(planned(0.3))
