"""How often a plan runs the user's Python: once for each assignment that it estimates or compiles,
and twice more at most, since a step is traced with everything recomputed and as it is written.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from tests.shared import models

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
LAYERS = models.parameters(4, 32)
BATCH = models.batch(8, 16, 32)


class Runs:
    """Counts the runs of a step's Python, and stores the plans that `build` was called with."""

    def __init__(self):
        self.count, self.plans = 0, []

    def build(self, plan):
        """A step of tagged layers."""
        self.plans.append(plan)
        loss = models.scanned(jaxmem.remat_policy(plan), models.narrow)

        def step(params, batch):
            self.count += 1
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

        return step

    def step(self, params, batch):
        """A step without a tag."""
        self.count += 1
        layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)
        loss = lambda params: (jax.lax.scan(layer, batch, params)[0] ** 2).mean()
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    def during(self, call):
        """The result of a call, the runs in it, and how often `build` got each plan."""
        self.count, self.plans = 0, []
        result = call()
        return result, self.count, [self.plans.count(plan) for plan in self.plans]


@pytest.mark.parametrize("tagged", [True, False])
def test_a_plan_traces_each_assignment_once(tagged):
    runs = Runs()
    build = runs.build if tagged else jaxmem.auto(runs.step)
    plan, count, _ = runs.during(lambda: jaxmem.plan(build, LAYERS, BATCH, budget="1GiB"))
    assert plan.keeps_everything
    assert count == 2
    budget = int(0.8 * plan.baseline_bytes)
    plan, count, often = runs.during(lambda: jaxmem.plan(build, LAYERS, BATCH, budget=budget))
    assert not plan.keeps_everything
    assert set(often) == ({1} if tagged else set())
    assert count <= plan.compiles + 2
