"""MaxText's own training step, as it is: each plan is within its budget, and no slower than the
best of MaxText's own remat policies that fits, by XLA's estimate and the time of host transfers.
"""

import functools
import os
import sys

import jax
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import BudgetError, StepError

sys.path.insert(0, os.path.dirname(__file__))  # a package of MaxText's is called `tests` too
from maxtext_step import MaxTextStep, maxtext_step

POLICIES = (
    "full", "save_qkv_proj", "save_out_proj", "minimal", "minimal_with_context",
    "qkv_proj_offloaded", "minimal_offloaded",
)  # fmt: skip
SIZE = (
    "vocab_size=32000", "base_num_query_heads=16", "base_num_kv_heads=16",
    "max_target_length=2048",
)  # fmt: skip
TOPOLOGY = ("compile_topology=v5e-8", "compile_topology_num_slices=1", "hardware=tpu")
ONE_DEVICE = ("internal_compile=True", "internal_compile_num_devices=1")
CASES = {
    "dot product, h200": ("dot_product", "h200", ONE_DEVICE),
    "dot product, h200:8": ("dot_product", "h200:8", ()),
    "dot product, v5e:8": ("dot_product", "v5e:8", TOPOLOGY),
    "flash, v5e:8": ("flash", "v5e:8", TOPOLOGY),
}
NEARLY = 1.001  # of a policy's seconds


@functools.cache
def step_under(policy: str, case: str) -> MaxTextStep:
    attention, _, extra = CASES[case]
    return maxtext_step(policy, attention, extra=(*SIZE, *extra))


def compiled(step: MaxTextStep, target: str, plan=None) -> Compiled | None:
    """The step as MaxText jits it, compiled for the target, for a TPU up to its buffers; None where
    XLA refuses it.
    """
    own = step.step if plan is None else jaxmem.auto(step.step, plan)
    with step.entered(), backend_for(Target.parse(target), workers=1) as backend:
        try:
            stages = trace(lambda _: step.jitted(own), None, step.args)
            return backend.compile_buffers(*stages).result()
        except StepError as error:
            print(f"{target}: {str(error)[:200]}")
            return None


@functools.cache
def frontier(case: str) -> dict[str, Compiled]:
    """MaxText's own policies, compiled."""
    target = CASES[case][1]
    found = {policy: compiled(step_under(policy, case), target) for policy in POLICIES}
    return {policy: one for policy, one in found.items() if one is not None}


def seconds_of(compiled: Compiled, target: str) -> float:
    """XLA's estimate of a policy's step, and at least the time of its copies to host memory and
    back, which XLA's estimate leaves out and a plan's seconds hold: for 2 GB each way over the link
    of an H200, XLA estimates 47 ms, and the copies alone take 73 ms.
    """
    with backend_for(Target.parse(target), workers=1) as backend:
        from_host, to_host = backend.link
    copies = compiled.host_bytes / to_host + compiled.host_bytes / from_host
    return max(compiled.xla_seconds, copies)


def best_that_fits(case: str, room: int) -> tuple[str, float] | None:
    """The fastest of MaxText's policies within the bytes that a plan may use, with its seconds."""
    target = CASES[case][1]
    fitting = {p: seconds_of(c, target) for p, c in frontier(case).items() if c.total_bytes <= room}
    return min(fitting.items(), key=lambda one: one[1], default=None)


@pytest.mark.parametrize("policy", ["full", "minimal"])
@pytest.mark.parametrize("case", CASES)
def test_plans_of_maxtexts_step(case, policy):
    _, target, _ = CASES[case]
    step, own = step_under(policy, case), frontier(case)
    full = own["full"]
    kept = compiled(step, target, Assignment.everything())
    least, most = full.total_bytes, kept.total_bytes
    budgets = [0.95 * least, 1.05 * least, 1.3 * least, 2 * least, 0.5 * (least + most), 1.1 * most]
    seconds: dict[int, float] = {}
    refused: list[int] = []
    # For a TPU buffers alone are assigned here, and a returned plan was compiled whole: with
    # MaxText's attention kernel that takes 3.3 % more.
    near = 0.01 if target.startswith("h200") else 0.05
    for budget in map(int, sorted(budgets)):
        with step.entered():
            try:
                plan = jaxmem.plan(
                    jaxmem.auto(step.jitted(step.step)), *step.args, budget=budget, target=target
                )
            except BudgetError:
                refused.append(budget)
                continue
        assert plan.compiled_bytes <= budget
        assert plan.baseline_bytes == pytest.approx(most, rel=near)
        assert plan.written.bytes == pytest.approx(own[policy].total_bytes, rel=near)
        again = compiled(step, target, plan)
        assert again.total_bytes == pytest.approx(plan.compiled_bytes, rel=near)
        margin = 0.98 if target.startswith("h200") else 0.99
        best = best_that_fits(case, int(margin * budget))
        print(case, policy, budget, plan.compiled_bytes, plan.predicted_seconds, best, flush=True)
        if best is not None:
            assert plan.predicted_seconds <= NEARLY * best[1], (best, plan)
        seconds[budget] = plan.predicted_seconds
    assert all(budget < 1.05 * least for budget in refused)
    # At twice the bytes of full recomputation a tenth of its time is gained, or what any budget
    # gains: where collectives and the head take most of the step, that is less. Changes of single
    # tags by whole steps end up to half a per cent from the best plan of another budget's search.
    reachable = max(0.9 * full.xla_seconds, 1.005 * min(seconds.values()))
    assert seconds[int(2 * least)] <= reachable
    assert jax.default_backend() == "cpu"
