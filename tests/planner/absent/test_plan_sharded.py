"""Every number of a plan over several devices is one device's, however the step is divided: by its
arguments, by its jit, or by shard_map.
"""

import functools

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.errors import BudgetError, JaxmemWarning, StepError
from tests.shared import models
from tests.shared.mapped import stepping

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
TARGET = "a100-80gb:4"  # its times are computed, and are in proportion to bytes
DEVICES, LAYERS, P = 4, 4, PartitionSpec
BATCH, SEQUENCE, WIDTH = 16, 128, 64
UP = BATCH * SEQUENCE * 2 * WIDTH * 4  # bytes of the tag "up" of one layer, on one device of one
WHOLE = {"up": UP, "mask": UP // 4, "act": UP}
SHAPES = models.shapes(LAYERS, WIDTH, BATCH, SEQUENCE)
LOSS = functools.partial(models.scanned, block=models.narrow)
BUILD = models.build_with(LOSS)
MESH = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
SHARDINGS = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))


TYPED = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
IN_TYPES = NamedSharding(TYPED, P()), NamedSharding(TYPED, P("data"))


def placed(shardings=SHARDINGS):
    put = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    (p, x), (whole, rows) = SHAPES, shardings
    return {name: put(a, whole) for name, a in p.items()}, put(x, rows)


def jitted(plan):
    return jax.jit(BUILD(plan), donate_argnums=0, in_shardings=SHARDINGS)


def mapped(plan, mesh=MESH):
    loss = LOSS(jaxmem.remat_policy(plan))
    one = lambda p, x: jax.lax.pmean(loss(p, x), "data")
    return stepping(jax.shard_map(one, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))


WAYS = {
    "by its arguments": (BUILD, placed()),
    "by its jit": (jitted, SHAPES),
    "by shard_map": (mapped, placed()),
    "by their types": (BUILD, placed(shardings=IN_TYPES)),
    "by shard_map, and types": (functools.partial(mapped, mesh=TYPED), placed(shardings=IN_TYPES)),
}


@functools.cache
def kept(way):
    build, args = WAYS[way]
    return jaxmem.plan(build, *args, target=TARGET, actions=jaxmem.plans.LOSSLESS)


@functools.cache
def tight(way):
    build, args = WAYS[way]
    budget = int(0.5 * kept(way).baseline_bytes)
    return jaxmem.plan(build, *args, target=TARGET, budget=budget)


@pytest.mark.quick(
    "kept-by its arguments",
    "tight-by its jit",
    "kept-by shard_map",
    "tight-by shard_map, and types",
    "kept-by their types",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan_for", [kept, tight])
def test_the_table_has_one_devices_bytes(way, plan_for):
    plan = plan_for(way)
    assert {r.tag: DEVICES * r.bytes_before for r in plan.rows} == WHOLE
    assert all(r.bytes_after <= r.bytes_before for r in plan.rows)
    assert "(bytes and ms of one layer, on each of 4 devices)" in str(plan)


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_steps_bytes_are_one_devices(way):
    plan = kept(way)
    *whole, batch = (4 * a.size for a in jax.tree.leaves(SHAPES))
    assert plan.parts.arguments == sum(whole) + batch // DEVICES
    # Everything that the blocks' backward reads is stored: at least the tags, at most all bytes.
    tags = LAYERS * sum(WHOLE.values()) // DEVICES
    assert tags <= plan.parts.saved <= plan.compiled_bytes - plan.parts.arguments
    tighter = tight(way)
    assert abs(tighter.predicted_bytes / tighter.compiled_bytes - 1) < 0.25, "not of four devices"
    assert tighter.compiled_bytes <= tighter.budget_bytes
    assert all(p.bytes <= plan.baseline_bytes for p in tighter.pareto())


def test_the_ways_agree():
    plans = [kept(way) for way in WAYS]
    for number in ("baseline_bytes", "predicted_seconds"):
        values = [getattr(plan, number) for plan in plans]
        assert max(values) < 1.1 * min(values), number
    milliseconds = [[row.milliseconds for row in kept(way).rows] for way in WAYS]
    assert all(max(ms) == pytest.approx(min(ms), rel=0.1) for ms in zip(*milliseconds))


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_says_what_kernels_take_where_it_was_compiled_without_them(way):
    build, args = WAYS[way]
    asked = functools.partial(jaxmem.plan, build, *args, target=TARGET)
    budget = int(0.5 * kept(way).baseline_bytes)
    compressed = asked(budget=budget, actions=["compress", "recompute"])
    codecs = {c.codec for t in compressed.actions.values() for c in t.values() if c.codec}
    assert codecs
    has_kernel = codecs != {"bit_mask()"}  # GPUs run the reference of masks everywhere
    told = [note for note in compressed.notes if "kernels run in place" in note]
    # Inside shard_map the arrays are each device's own, and the kernels are compiled.
    assert len(told) == (has_kernel and "shard_map" not in way)
    assert not [note for note in kept(way).notes if "kernels run in place" in note]


@pytest.mark.parametrize("way", WAYS)
def test_explain_finds_saved_tensors_of_one_device(way):
    build, args = WAYS[way]
    found = jaxmem.explain(build, *args, target=TARGET)
    assert sum(part.bytes for part in found.parts) == found.total_bytes
    saved = {part.name: part.bytes for part in found.parts if part.kind == "saved"}
    assert any("up" in name for name in saved), found
    assert all(size % (LAYERS * UP // 4 // DEVICES) == 0 for size in saved.values())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("local", "AbstractMesh of 4 devices, and the target is 'local'.*target='h200:4'"),
        ("h200", "over 4 devices, but the target has 1.*'h200:4'"),
        ("v5e:8", "over 4 devices, but the target has 8.*'v5e:4'"),
    ],
)
def test_a_mesh_that_the_target_does_not_have_is_refused_before_a_trace(target, message):
    build = lambda plan: pytest.fail("the step is traced")
    with pytest.raises(StepError, match=message):
        jaxmem.plan(build, *placed(), budget="1MiB", target=target)


def test_an_error_tells_each_devices_bytes():
    build, args = WAYS["by its jit"]
    with pytest.raises(BudgetError, match=r"least that compiled is .* on each of 4 devices for"):
        jaxmem.plan(build, *args, target=TARGET, budget="1.2MiB", actions=["recompute"])


def test_a_copy_for_want_of_donation_is_told_in_one_devices_bytes():
    divided = NamedSharding(MESH, P(None, "data"))
    shapes = placed(shardings=(divided, SHARDINGS[1]))
    undonated = lambda plan: jax.jit(BUILD(plan))
    whole = sum(a.size * 4 for a in jax.tree.leaves(SHAPES[0]))
    with pytest.warns(JaxmemWarning, match="does not donate") as caught:
        jaxmem.plan(undonated, *shapes, target=TARGET)
    (told,) = (str(w.message) for w in caught if "does not donate" in str(w.message))
    assert f"the step replaces {whole / DEVICES / 1024:.1f} KiB of its argument" in told
