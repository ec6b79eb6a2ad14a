"""Plans for GPUs that are not there. Layers whose attention runs inside `jax.shard_map` are planned
for eight devices: pieces are compiled on the mesh, and saved tensors have XLA's bytes.
"""

import functools
import math
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxmem
from jaxmem._core.actions import Action
from jaxmem._core.quiet import LIBTPU
from jaxmem._target.compile.backend import Deviceless
from jaxmem._target.deviceless import tpu
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.devices.target import Target
from jaxmem._trace.export import export_flat
from jaxmem._trace.job import Job
from jaxmem.errors import BudgetError, JaxmemWarning
from tests.shared import mapped, models, plans

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
    # Full recomputation is faster here by XLA's estimate. An earlier search may have compiled it.
    plan_for = functools.partial(
        jaxmem.plan, build_whole, *SHAPES, target="h200", actions=wanted, fresh=True
    )
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
    with pytest.raises(BudgetError, match=rf"\({whole} bytes\) for target 'h200'.*; 4% of the"):
        jaxmem.plan(build, *SHAPES, target="h200", budget=whole)
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "data"))
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=spec)
    with pytest.raises(BudgetError, match=rf"\({whole // 2} bytes\) on each of 2 devices") as e:
        jaxmem.plan(build, *jax.tree.map(place, SHAPES), target="h200:2", budget="10KB")
    assert e.value.least_bytes == whole // 2


@CORE
def test_the_least_budget_of_a_refusal_is_met(unplanned):
    """The least bytes are not, since a part of a GPU's budget is left for the device."""
    plan_for = functools.partial(jaxmem.plan, build, *SHAPES, target="h200")
    arguments = sum(a.size * 4 for a in jax.tree.leaves(SHAPES))
    with pytest.raises(BudgetError, match="the least that compiled") as refused:
        plan_for(budget=int(arguments / 0.96) + 100)
    error = refused.value
    assert f"{error.least_budget} bytes" in str(error)
    with pytest.raises(BudgetError):
        plan_for(budget=error.least_bytes)
    plan = plan_for(budget=error.least_budget)
    assert plan.compiled_bytes <= error.least_bytes < error.least_budget == plan.budget_bytes


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


TARGETS = "h200:8", "v5e:8"
PLATFORM = {"h200:8": "cuda", "v5e:8": "tpu"}
BATCH, SEQUENCE, WIDTH = 64, 1024, 128  # of a piece that takes longer than a launch
X = BATCH, SEQUENCE, WIDTH


def job(kind=mapped.wholly):
    """A product that XLA divides as what follows it: a row of heads inside a `jax.shard_map`."""
    inner = kind(mapped.mesh(), mapped.untagged, False)
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    function = lambda x, w: jnp.tanh(inner(x @ w))
    return Job(function, (jax.ShapeDtypeStruct(X, jnp.float32), w), {"data": 2, "fsdp": 2})


@pytest.mark.quick("v5e:8")
@pytest.mark.parametrize("target", TARGETS)
def test_a_piece_is_compiled_for_all_devices(target):
    """XLA divides its arguments as the `jax.shard_map` reads what is made of them."""
    exported, _ = export_flat(job().trace(), PLATFORM[target], 90)
    with Compiler(target, workers=1) as compiler:
        results = [compiler.submit(exported, free=free).result() for free in (True, False)]
    made, whole = (result.argument_bytes for result in results)
    rows, weights = 4 * BATCH * SEQUENCE * WIDTH, 4 * WIDTH * WIDTH
    assert 0 <= whole - (rows + weights) < 2**12, "whole on each device"
    assert 0 <= made - (rows // 4 + weights // 2) < 2**12, "four parts of the batch, two of heads"


@pytest.mark.parametrize("target", TARGETS)
def test_the_time_of_a_piece_is_one_devices(target):
    parts = job()
    one = Job(lambda x, w: jnp.tanh(mapped.attention(x @ w, mapped.untagged)), parts.avals)
    with Deviceless(Target.parse(target), workers=1) as backend:
        divided, alone = (timing.seconds for timing in backend.times([parts, one]))
    assert alone / 16 < divided < alone / 3


@pytest.fixture
def topology(monkeypatch):
    """A mesh of a TPU's topology, as programs make one that compile ahead of time."""
    alone = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}
    for name, value in (LIBTPU | alone).items():
        monkeypatch.setenv(name, value)
    described = Target.parse("v5e:8").topology
    assert described is not None
    devices = np.array(tpu.devices(tpu.described(described))).reshape(mapped.SIZES)
    return Mesh(devices, mapped.AXES, axis_types=(AxisType.Auto,) * 3)


def plan(target, build, mesh, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JaxmemWarning)
        return jaxmem.plan(build, *mapped.shapes(mesh), target=target, **how)


@pytest.mark.slow
def test_saved_tensors_have_the_bytes_that_are_compiled():
    mesh = mapped.mesh()
    build = mapped.build_with(mapped.wholly, mesh)
    made = plan("h200:8", build, mesh, actions=["keep"])
    rows = {row.tag: row for row in made.rows}
    assert {rows[name].choice.action.value for name in ("probs", "ctx")} == {"keep"}
    # Two of four rows of the batch of each device, or half of its features.
    probs, ctx = (mapped.LAYERS * rows[name].bytes_before for name in ("probs", "ctx"))
    assert (probs, ctx) == (3 * 2 * 16 * 16 * 4, 3 * 2 * 16 * 32 * 4)
    parts = jaxmem.explain(build, *mapped.shapes(mesh), target="h200:8", plan=made).parts
    saved = {part.name: part.bytes for part in parts if part.kind == "saved"}
    assert saved["saved: probs"] == probs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [mapped.wholly, mapped.partly, mapped.summed, mapped.ring])
@pytest.mark.parametrize("own", [False, True])
def test_a_step_under_a_topologys_mesh_is_planned(kind, own, topology):
    mesh = topology
    step = mapped.build_with(kind, mesh, tag=mapped.untagged, own=own)(None)
    with jax.set_mesh(mesh):
        made = plan("v5e:8", jaxmem.auto(step), mesh)
        tagged = plan("v5e:8", mapped.build_with(kind, mesh), mesh)
    for one in (made, tagged):
        assert one.time_source == "xla"
        assert one.compiled_bytes <= one.budget_bytes
    assert {"probs", "ctx"} <= {row.tag for row in tagged.rows}


@pytest.mark.slow
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", [mapped.by_tensor, mapped.ruled])
@pytest.mark.parametrize("looped", [False, True])
def test_a_gpus_step_is_planned(axes, kind, looped):
    mesh = mapped.mesh(axes)
    build = mapped.build_with(kind, mesh, looped=looped)
    step = mapped.build_with(kind, mesh, looped=looped, tag=mapped.untagged)(None)
    with jax.sharding.use_abstract_mesh(mesh):
        for one in (build, jaxmem.auto(step)):
            made = plan("h200:8", one, mesh)
            assert made.time_source == "xla"
            assert made.compiled_bytes <= made.baseline_bytes


@pytest.mark.slow
@pytest.mark.parametrize("tag", [jaxmem.tag, mapped.untagged])
def test_layers_with_a_shard_map_inside_another_are_planned(tag):
    mesh = mapped.mesh()
    build = mapped.mapped_loss(mesh, tag)
    one = build if tag is jaxmem.tag else jaxmem.auto(build(None))
    with jax.sharding.use_abstract_mesh(mesh):
        made = plan("h200:8", one, mesh)
        least = plan("h200:8", one, mesh, budget=int(0.9 * made.baseline_bytes))
    assert made.time_source == least.time_source == "xla"
    assert least.compiled_bytes <= 0.9 * made.baseline_bytes
    if tag is jaxmem.tag:
        # A device has half of the batch, and half of the features of the attention.
        rows = {row.tag: row.bytes_before for row in made.rows}
        assert (rows["q"], rows["ctx"]) == (4 * 16 * 64 * 4, 4 * 16 * 32 * 4)
