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
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._result.memory.explanation import Explanation, Part
from jaxmem._result.plan.plan import Plan
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
