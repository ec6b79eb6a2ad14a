"""Run by test_placed_sharded.py on several CPU devices: plans that divide states over them, each
trained beside one device's step with microbatches as many times larger, as JSON.

python -m tests.shared.worker tests.programs.planned_zero BUDGET ...
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.shared import tiny_lm
from tests.shared.compare import farthest

LAYERS, N, STEPS, ROWS = 6, 2, 3, 2
DECIDE = ("actions", "states", "sharding")


def build(plan, axis_name="data"):
    # A larger eps, so that rounding is not magnified where a gradient is nearly zero.
    tx = jaxmem.adama(0.01, eps=1e-3, accumulation_steps=N, axis_name=axis_name)
    return tiny_lm.released(tx, plan=plan)


def first():
    return build(None).init(tiny_lm.parameters(np.float32, layers=LAYERS, width=64, vocab=32))


def batch(seed: int):
    rows = ROWS * N * jax.device_count()
    return tiny_lm.tokens(rows, seed, vocab=32, sequence=16).astype(jnp.int32)


def alone():
    """Parameters and losses on one device. Devices take turns in a batch: device d's microbatch i
    is the rows of its part; one device's microbatch i has those of all devices.
    """
    step, state, losses = jax.jit(build(None, None)), first(), []
    for seed in range(STEPS):
        rows = batch(seed).reshape(jax.device_count(), N, ROWS, -1)
        state, metrics = step(state, rows.swapaxes(0, 1).reshape(batch(seed).shape))
        losses.append(float(metrics["loss"]))
    return state[0], losses


def planned(budget: str):
    plan = jaxmem.plan(build, first(), batch(0), budget=budget, decide=DECIDE)
    state = plan.place(first())
    # What lies there already is left as it is.
    same = jax.tree.map(lambda a, b: a is b, state, plan.place(state))
    assert all(jax.tree.leaves(same))
    losses = []
    for seed in range(STEPS):
        state, metrics = plan.step(state, batch(seed))
        losses.append(float(metrics["loss"]))
    return plan, build(None).joined(state)[0], losses


def main(*budgets):
    warnings.simplefilter("ignore")
    want, losses = alone()
    found = {}
    for budget in budgets:
        plan, params, got = planned(budget)
        loaded = jaxmem.Plan(**{**vars(plan), "_step": None, "_split": None})
        verified = jaxmem.verify(loaded, build, first(), batch(0))
        found[budget] = {
            "divided": plan.divided,
            "far": farthest(params, want),
            "losses": [got, losses],
            "budget": plan.budget_bytes,
            "compiled": plan.compiled_bytes,
            "verified": verified.compiled_bytes,
            "text": str(plan),
        }
    return {"devices": jax.device_count(), "found": found}
