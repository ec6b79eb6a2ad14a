"""Plans for GPUs that are not there."""

import functools
import math
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import Action
from jaxmem.errors import BudgetError
from tests.shared import models, plans

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
SHAPES = models.shapes(4, 64, 16, 128)
build = models.build_of(models.narrow)
build_whole = models.build_of(models.block)  # whose tags are worth sending to the host
CORE = pytest.mark.core
OFFLOADS = tuple(int(p) for p in version("jaxlib").split(".")[:3]) >= (0, 11, 1)


@pytest.fixture(scope="module")
def unplanned(own_database):
    return jaxmem.plan(build, *SHAPES, target="h200")


@CORE
def test_a_plan_for_an_h200(unplanned, tmp_path):
    plan = jaxmem.plan(build, *SHAPES, target="h200", budget=int(0.4 * unplanned.baseline_bytes))
    assert plan.compiled_bytes <= 0.98 * plan.budget_bytes, "room is left for autotuning"
    assert plan.compiles <= 6
    assert plan.time_source == "xla"
    assert plan.target == "h200"
    with pytest.raises(jaxmem.errors.StepError, match="h200"):
        _ = plan.step
    verified = jaxmem.verify(plans.reloaded(plan, tmp_path), build, *SHAPES)
    assert verified.compiled_bytes == plan.compiled_bytes
    assert any("offload is left out" in note for note in plan.notes) != OFFLOADS


@CORE
def test_with_room_a_plan_is_the_fastest_by_xla_and_with_more_none_is_slower(unplanned):
    budgets = [int(share * unplanned.baseline_bytes) for share in (0.4, 0.6, 0.8)]
    found = [jaxmem.plan(build, *SHAPES, target="h200", budget=budget) for budget in budgets]
    found.append(unplanned)
    assert {plan.baseline_source for plan in found} == {"xla"}
    assert len({plan.baseline_seconds for plan in found}) == 1
    seconds = [plan.predicted_seconds for plan in found]
    assert seconds == sorted(seconds, reverse=True)
    assert unplanned.predicted_seconds <= unplanned.baseline_seconds
    # What keeps everything is the step as it is, and all else is faster.
    as_it_is = unplanned.predicted_seconds == unplanned.baseline_seconds
    assert unplanned.keeps_everything == as_it_is


def least_on_the_host(row) -> float:
    """Bytes that a tag sent to the host takes there at the very least, over all layers: scales come
    on top.
    """
    elements = row.layers * math.prod(row.shape)
    if row.choice.action is Action.OFFLOAD:
        return elements * jnp.dtype(row.dtype).itemsize
    return elements / (8 if row.choice.codec == "bit_mask()" else 2)


@pytest.mark.parametrize("also", [[], pytest.param([Action.COMPRESS_OFFLOAD], marks=CORE)])
def test_offload_moves_bytes_to_the_host(also):
    wanted = [Action.OFFLOAD, *also]
    plan_for = functools.partial(jaxmem.plan, build_whole, *SHAPES, target="h200", actions=wanted)
    if not OFFLOADS:
        with pytest.raises(jaxmem.errors.TargetError, match="jaxlib"):
            plan_for(budget="40%")
        return
    budget = int(0.4 * plan_for().baseline_bytes)
    plan = plan_for(budget=budget)
    sent = [row for row in plan.rows if row.choice.action.offloads]
    assert sent
    assert plan.host_bytes >= sum(map(least_on_the_host, sent)) > 0, "as XLA counts"
    assert plan.compiled_bytes <= plan.budget_bytes
    without = plan_for(budget=budget, host_budget=1000)
    assert without.host_bytes <= 1000, "recomputation is always open"


def test_a_hopeless_budget_names_each_devices_bytes():
    whole = sum(a.size * 4 for a in jax.tree.leaves(SHAPES))
    with pytest.raises(BudgetError, match=rf"\({whole} bytes\) for target 'h200'.*; 2% of the"):
        jaxmem.plan(build, *SHAPES, target="h200", budget=whole)
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "data"))
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=spec)
    with pytest.raises(BudgetError, match=rf"\({whole // 2} bytes\) on each of 2 devices") as e:
        jaxmem.plan(build, *jax.tree.map(place, SHAPES), target="h200:2", budget="10KB")
    assert e.value.least_bytes == whole // 2


def test_offload_wants_a_scan():
    if not OFFLOADS:
        return
    unrolled = models.build_of(models.block, models.unrolled)
    with pytest.warns(jaxmem.errors.JaxmemWarning, match="jax.lax.scan"):
        plan = jaxmem.plan(unrolled, *SHAPES, target="h200", budget="40MiB")
    assert not any(c.action.offloads for c in plan.actions["block"].values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxmem.plan(unrolled, *SHAPES, target="h200", actions=["keep", "recompute"])
