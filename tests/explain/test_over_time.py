"""Live bytes of compiled steps: at the peak they are the table's, and nowhere more."""

import collections
import dataclasses
import json

import jax.numpy as jnp
import pytest

from jaxmem._core.actions import KEEP, RECOMPUTE
from jaxmem._planner.explain.explain import explain
from jaxmem._planner.explain.over_time import elsewhere
from jaxmem._result.memory.explanation import Explanation, load
from jaxmem._result.memory.live import Live
from jaxmem._target.buffers.held_buffers import POINTS, Held, Life, Peak
from jaxmem._target.compile import backend
from tests.explain.test_explain import (
    BATCH,
    LAYERS,
    SEQUENCE,
    STEP,
    UP_BYTES,
    WIDTH,
    layer,
    plan_of,
)
from tests.shared import models

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


def test_a_gpu_that_is_not_there():
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
