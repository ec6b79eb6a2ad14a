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
from tests.shared import models

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
SHAPES = models.shapes(4, 64, 16, 128)
build = models.build_with(functools.partial(models.scanned, block=models.narrow))
build_whole = models.build_with(models.scanned)  # whose tags are worth sending to the host
OFFLOADS = tuple(int(p) for p in version("jaxlib").split(".")[:3]) >= (0, 11, 1)


@pytest.fixture(scope="module")
def unplanned(own_database):
    return jaxmem.plan(build, *SHAPES, target="h200")


@pytest.mark.core
def test_a_plan_for_an_h200(unplanned, tmp_path):
    plan = jaxmem.plan(build, *SHAPES, target="h200", budget=int(0.4 * unplanned.baseline_bytes))
    assert plan.compiled_bytes <= 0.98 * plan.budget_bytes, "room is left for autotuning"
    assert plan.compiles <= 6
    assert plan.time_source == "xla"
    assert plan.target == "h200"
    with pytest.raises(jaxmem.errors.StepError, match="h200"):
        _ = plan.step
    plan.save(tmp_path / "plan.json")
    verified = jaxmem.verify(jaxmem.Plan.load(tmp_path / "plan.json"), build, *SHAPES)
    assert verified.compiled_bytes == plan.compiled_bytes
    assert any("offload is left out" in note for note in plan.notes) != OFFLOADS


@pytest.mark.core
def test_with_room_a_plan_is_the_fastest_by_xla_and_with_more_none_is_slower(unplanned):
    plan_for = lambda share: jaxmem.plan(
        build, *SHAPES, target="h200", budget=int(share * unplanned.baseline_bytes)
    )
    plans = [*(plan_for(share) for share in (0.4, 0.6, 0.8)), unplanned]
    assert {plan.baseline_source for plan in plans} == {"xla"}
    assert len({plan.baseline_seconds for plan in plans}) == 1
    seconds = [plan.predicted_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert unplanned.predicted_seconds <= unplanned.baseline_seconds
    assert unplanned.keeps_everything == (
        unplanned.predicted_seconds == unplanned.baseline_seconds
    ), "what keeps everything is the step as it is, and all else is faster"


def least_on_the_host(row) -> float:
    """Bytes that a tag sent to the host takes there at the very least, over all layers: scales come
    on top.
    """
    elements = row.layers * math.prod(row.shape)
    if row.choice.action is Action.OFFLOAD:
        return elements * jnp.dtype(row.dtype).itemsize
    return elements / (8 if row.choice.codec == "bit_mask()" else 2)


@pytest.mark.parametrize(
    "wanted",
    [
        [Action.OFFLOAD],
        pytest.param([Action.OFFLOAD, Action.COMPRESS_OFFLOAD], marks=pytest.mark.core),
    ],
)
def test_offload_moves_bytes_to_the_host(wanted):
    plan_for = functools.partial(jaxmem.plan, build_whole, *SHAPES, target="h200", actions=wanted)
    if not OFFLOADS:
        with pytest.raises(jaxmem.errors.TargetError, match="jaxlib"):
            plan_for(budget="40%")
        return
    budget = int(0.4 * plan_for().baseline_bytes)
    plan = plan_for(budget=budget)
    sent = [row for row in plan.rows if row.choice.action.offloads]
    assert sent
    assert plan.host_bytes >= sum(map(least_on_the_host, sent)) > 0, (
        "XLA's own count of host memory"
    )
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
    unrolled = models.build_with(models.unrolled)
    with pytest.warns(jaxmem.errors.JaxmemWarning, match="jax.lax.scan"):
        plan = jaxmem.plan(unrolled, *SHAPES, target="h200", budget="40MiB")
    assert not any(c.action.offloads for c in plan.actions["block"].values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxmem.plan(unrolled, *SHAPES, target="h200", actions=["keep", "recompute"])
