"""Explanations of compiled steps: which tensors hold the bytes at the peak. Live bytes over the
step: at the peak they are the table's, and nowhere more.
"""

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, RECOMPUTE, Action, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.profile.profile import block_classes
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._planner.explain.explain import explain
from jaxmem._planner.explain.over_time import elsewhere
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._result.memory.explanation import Explanation, Part, load
from jaxmem._result.memory.live import Live
from jaxmem._result.plan.plan import Plan
from jaxmem._target.buffers.held_buffers import POINTS, Held, Life, Peak
from jaxmem._target.compile import backend
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import StepError
from tests.shared import models, plans

LAYERS, BATCH, SEQUENCE, WIDTH = 3, 4, 32, 32
UP_BYTES = LAYERS * BATCH * SEQUENCE * 4 * WIDTH * 4  # four bytes a value
INT4 = Choice(Action.COMPRESS, "grouped_symmetric(group=64,scale=float32)")


def layer(x, p, _):
    """An MLP whose tags all differ in size or in what makes them."""
    up = jaxmem.tag(x @ p["up"], "up", kind="linear")
    return x + jaxmem.tag(jnp.tanh(up) * up, "act", kind="gelu") @ p["down"]


BUILD = models.build_with(lambda policy: models.scanned(policy, layer))
STEP = BUILD, {
    "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
    "down": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
}, jax.ShapeDtypeStruct((BATCH, SEQUENCE, WIDTH), jnp.float32)  # fmt: skip


def plan_of(step, choices, target="local") -> Plan:
    """A plan with these choices for the one block."""
    build, *args = step
    with todays_checkpoint():
        blocks = block_classes(trace(build, Assignment.nothing(), tuple(args))[1].jaxpr)
    fingerprint = plan_fingerprint(blocks)
    return plans.plan(actions={"block": choices}, target=target, fingerprint=fingerprint)


def compiled_total(step, actions) -> int:
    build, *args = step
    backend = backend_for(Target.parse("local"))
    (step,) = StepCompiler(build, tuple(args), backend).compile_buffers(actions)
    return step.compiled.total_bytes


def part(found: Explanation, name: str) -> Part:
    (one,) = [p for p in found.parts if p.name == name]
    return one


def saved(found: Explanation) -> dict[str, int]:
    return {p.name: p.bytes for p in (*found.parts, *found.host_parts) if p.kind == "saved"}


def add_up(found: Explanation) -> None:
    assert sum(p.bytes for p in found.parts) == found.total_bytes
    assert sum(p.bytes for p in found.host_parts) == found.host_bytes
    for p in (*found.parts, *found.host_parts):
        assert sum(i.bytes for i in p.items) == p.bytes > 0


@pytest.mark.core
def test_classes_add_up_to_what_a_plan_compiles_to():
    kept = {"up": KEEP, "act": RECOMPUTE}
    found = explain(*STEP, plan=plan_of(STEP, kept))
    add_up(found)
    assert found.total_bytes == compiled_total(STEP, {"block": kept})
    assert [p for p in found.parts if "not in the buffer assignment" in p.name] == []
    assert saved(found) == {"saved: up": UP_BYTES}
    p = part(found, "arguments: p")
    assert p.bytes == 2 * LAYERS * 4 * WIDTH * WIDTH * 4
    assert {i.name for i in p.items} == {"p['up'] f32[3,32,128]", "p['down'] f32[3,128,32]"}
    assert part(found, "batch: x").bytes == BATCH * SEQUENCE * WIDTH * 4
    assert (
        json.loads(json.dumps(dataclasses.asdict(found)))["parts"][0]["bytes"]
        == found.parts[0].bytes
    )


@pytest.mark.core
def test_what_is_recomputed_is_not_held_and_codes_are():
    found = explain(*STEP, plan=plan_of(STEP, {"up": RECOMPUTE, "act": RECOMPUTE}))
    add_up(found)
    assert saved(found) == {}
    assert "up" not in " ".join(p.name for p in found.parts)
    assert part(found, "saved: input of the layer").bytes == LAYERS * BATCH * SEQUENCE * WIDTH * 4
    codes = explain(*STEP, plan=plan_of(STEP, {"up": INT4, "act": RECOMPUTE}))
    add_up(codes)
    assert saved(codes) == {"saved: codes of up": UP_BYTES // 8 + UP_BYTES // 64}


@pytest.mark.core
def test_everything_kept_names_every_tag_of_a_block():
    step = models.build_with(models.scanned), models.parameters(width=16), models.batch()
    found = explain(*step)
    add_up(found)
    assert found.total_bytes == compiled_total(step, {"block": {"*": KEEP}})
    named = " ".join(saved(found))
    for name in ("ln", "probs", "up", "gelu"):
        assert name in named
    assert part(found, "saved: probs").bytes == 2 * 2 * 8 * 8 * 4


def test_a_step_without_blocks_and_without_donation_is_explained():
    def build(plan):
        return jax.jit(lambda state, x: ({"w": state["w"] + x.sum()}, x.mean()))

    state = {"w": jnp.zeros((64, 64), jnp.float32), "opt": [jnp.zeros(8, jnp.float32)] * 2}
    found = explain(build, state, jnp.ones((32, 32), jnp.float32))
    add_up(found)
    assert part(found, "outputs, apart from donated arguments").bytes >= 64 * 64 * 4
    assert "donate what they replace" in found.advice or "arguments" in found.advice


def test_a_message_of_another_format_is_a_clear_error(monkeypatch):
    whole = backend.compile_dumped
    broken = lambda lowered, options: (whole(lowered, options)[0], b"\x0b\x0c")
    monkeypatch.setattr(backend, "compile_dumped", broken)
    with pytest.raises(StepError, match="buffer assignment .2 bytes. cannot be read"):
        explain(*STEP)


def test_a_compile_that_is_cached_is_explained_all_the_same(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    try:
        for name, value in zip(names, (str(tmp_path), 0.0)):
            jax.config.update(name, value)
        found = [explain(*STEP).total_bytes for _ in range(2)]
        assert found[0] == found[1]
        assert jax.config.values["jax_enable_compilation_cache"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_gpu_that_is_not_there():
    kept = {"up": KEEP, "act": RECOMPUTE}
    found = explain(*STEP, plan=plan_of(STEP, kept), target="h200")
    add_up(found)
    assert found.target == "h200"
    assert saved(found) == {"saved: up": UP_BYTES}
    assert {i.name for i in part(found, "arguments: p").items} == {
        "p['up'] f32[3,32,128]",
        "p['down'] f32[3,128,32]",
    }
    build, *args = STEP
    with backend_for(Target.parse("h200"), workers=1) as backend:
        steps = StepCompiler(build, tuple(args), backend)
        assert steps.compile_buffers({"block": kept})[0].compiled.total_bytes == found.total_bytes


WITH_UP = {"up": KEEP, "act": RECOMPUTE}


def live_of(found: Explanation) -> Live:
    """The live bytes, which at the peak are what the table says, the packing left out."""
    live = found.live
    at_peak = collections.Counter({(p.kind, p.name): p.bytes[live.peak] for p in live.parts})
    table = collections.Counter(
        {(p.kind, p.name): p.bytes for p in found.parts if p.kind != "packing"}
    )
    assert +at_peak == table
    packing = sum(p.bytes for p in found.parts if p.kind == "packing")
    assert max(live.totals) + packing == live.total_bytes == found.total_bytes
    assert 0 < live.points <= min(POINTS, live.instructions)
    assert all(len(p.bytes) == live.points and max(p.bytes) > 0 for p in live.parts)
    assert [p for x in live.phases for p in range(x.first, x.last + 1)] == [*range(live.points)]
    return live


def points_of(live: Live, *phase) -> set[int]:
    """The points of a phase, told by its name and whether it is a loop."""
    found = (range(p.first, p.last + 1) for p in live.phases if (p.name, p.loop) == phase)
    return {at for one in found for at in one}


@pytest.mark.core
def test_a_saved_tensor_is_there_from_the_forward_loop_to_the_end_of_the_backward_one():
    found = explain(*STEP, plan=plan_of(STEP, WITH_UP))
    live = live_of(found)
    (up,) = [p for p in live.parts if p.name == "saved: up"]
    assert {*up.bytes} == {0, UP_BYTES}
    there = {at for at, size in enumerate(up.bytes) if size}
    loops = points_of(live, "forward", True), points_of(live, "backward", True)
    assert all(loops)
    assert there >= loops[0] | loops[1]
    assert there == {*range(min(there), max(there) + 1)}, "without a gap"
    forward = [p for p in live.parts if p.name == "one layer's working memory, forward"]
    assert forward, "it is gone at the peak, and was never in the table"
    assert {at for at, size in enumerate(forward[0].bytes) if size} & loops[0]


@pytest.mark.core
def test_everything_kept_stands_beside_a_plan():
    plan = plan_of(STEP, WITH_UP)
    found = explain(*STEP, plan=plan, beside=True)
    kept = found.beside
    assert kept == explain(*STEP)
    assert (found.plan, kept.plan) == ("under the plan", "everything kept")
    assert max(live_of(found).totals) < max(live_of(kept).totals)
    assert explain(*STEP, plan=plan).beside is None
    assert explain(*STEP, beside=True).beside is None, "everything kept is what was asked for"


def test_it_survives_its_file(tmp_path):
    found = explain(*STEP, plan=plan_of(STEP, WITH_UP), beside=True)
    (tmp_path / "explained.json").write_text(json.dumps(found.to_json()))
    assert load(tmp_path / "explained.json") == found


def test_layers_in_a_python_loop_have_their_tags_too():
    step = models.build_with(lambda policy: models.unrolled(policy, layer)), *STEP[1:]
    live = live_of(explain(*step))
    assert any("up" in p.name for p in live.parts if p.kind == "saved")
    assert not any(phase.loop for phase in live.phases)
    assert [p.name for p in live.phases][:2] == ["forward", "backward"]


def test_what_is_saved_is_named_where_the_peak_is_after_the_backward():
    """The largest tensors are made when nothing that was saved is there any more."""

    def build(plan):
        inner = STEP[0](plan)

        def step(p, x):
            new, loss = inner(p, x)
            wide = jnp.sort(jnp.tile(new["up"].reshape(-1), 300))
            return new, loss + jnp.cumsum(wide)[17]

        return step

    found = explain(build, *STEP[1:])
    live = live_of(found)
    assert not any(p.kind == "saved" for p in found.parts)
    assert "backward" not in found.peak_at
    (up,) = [p for p in live.parts if p.name == "saved: up"]
    assert {*up.bytes} == {0, UP_BYTES}


def test_microbatches_are_one_turn():
    build = models.build_with(lambda policy: models.scanned(policy, layer), microbatches=2)
    live = live_of(explain(build, *STEP[1:]))
    gradients = [p for p in live.parts if p.kind == "gradients"]
    assert max(gradients[0].bytes) == 2 * 2 * LAYERS * 4 * WIDTH * WIDTH * 4


def test_without_a_history_there_is_no_chart(monkeypatch):
    whole = backend.peak
    bare = lambda dumped: dataclasses.replace(whole(dumped), moments=0, points=(), lives=())
    monkeypatch.setattr(backend, "peak", bare)
    found = explain(*STEP)
    assert found.live is None
    assert "schedule" not in str(found)
    assert sum(p.bytes for p in found.parts) == found.total_bytes


def test_live_bytes_on_a_gpu_that_is_not_there():
    found = explain(*STEP, plan=plan_of(STEP, WITH_UP), target="h200", beside=True)
    live = live_of(found)
    assert {*next(p for p in live.parts if p.name == "saved: up").bytes} == {0, UP_BYTES}
    assert live_of(found.beside).total_bytes > live.total_bytes
    x = next(p for p in live.parts if p.name == "batch: x")
    assert {*x.bytes} == {BATCH * SEQUENCE * WIDTH * 4}


def test_a_stack_that_is_copied_for_the_loop_over_layers_is_found():
    """The backward has two loops, of the head and of the layers; only what is alive where one of
    them begins can be saved.
    """
    forward, backward = "jit(f)/jvp()/tanh", "jit(f)/transpose(jvp())/mul"
    loops = [("a",)] * 20 + [("head",)] * 20 + [()] * 20 + [("b",)] * 20
    held = [Held("temporary", size) for size in (1, 2, 3, 4, 5)]
    spans = [(0, 10), (5, 45), (50, 79), (62, 70), (0, 79)]
    lives = tuple(Life(h, first, last) for h, (first, last) in zip(held, spans))
    points = tuple(zip((forward,) * 20 + (backward,) * 60, loops, strict=True))
    found = elsewhere(Peak(forward, (), (held[4],), 80, points, lives))
    assert [h.bytes for h in found.held] == [2, 3], "the last one is there at the peak"
