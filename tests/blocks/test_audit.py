"""The audit of a traced step against the profile's prediction, and against sizes worked out by
hand.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import ALL, KEEP, OFFLOAD, UNTAGGED
from jaxmem._core.assignment import Assignment
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import block_classes, profile
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import StepError
from tests.shared import models, tiny_lm
from tests.shared.audit import audit, loop_bytes

LAYERS, BATCH, SEQUENCE, WIDTH = 3, 2, 64, 64
FLOATS = BATCH * SEQUENCE * WIDTH * 4  # bytes of one residual-stream tensor
BYTES = {
    "in": FLOATS,
    "ln": FLOATS,
    "probs": BATCH * SEQUENCE**2 * 4,
    "mid": FLOATS,
    "mask": FLOATS // 4,
    "up": 2 * FLOATS,
    "gelu": 2 * FLOATS,
}
ARGS = (
    models.parameters(LAYERS, WIDTH, "float32"),
    models.batch(BATCH, SEQUENCE, WIDTH, "float32"),
)


def traced(choices, loss=models.scanned, args=ARGS, microbatches=1):
    return trace(
        models.build_with(loss, microbatches),
        None if choices is None else Assignment({"block": choices}),
        args,
    )[1]


@pytest.mark.parametrize("tag", models.TAGS)
def test_a_kept_tag_is_counted_as_its_bytes_times_layers(tag):
    chosen = {"in": KEEP, tag: KEEP}
    expected = LAYERS * sum(BYTES[t] for t in chosen)
    assert (audit(traced(chosen)).saved_bytes, audit(traced(chosen)).host_bytes) == (expected, 0)


def test_an_offloaded_tag_is_counted_in_host_memory():
    found = audit(traced({"in": KEEP, "up": OFFLOAD}))
    assert (found.saved_bytes, found.host_bytes) == (LAYERS * BYTES["in"], LAYERS * BYTES["up"])


@pytest.mark.parametrize("action", ["keep", "offload"])
def test_stacks_between_the_loops_are_the_saved_bytes(action):
    step = traced(models.actions(action))
    found = audit(step)
    assert loop_bytes(step.jaxpr.jaxpr) == found.saved_bytes + found.host_bytes > 0


def test_the_input_is_held_where_no_tag_is_kept():
    assert audit(traced({})).saved_bytes == LAYERS * BYTES["in"]


def test_products_that_are_recomputed_are_counted_by_layer():
    """Forward: n @ a, scores, probs @ n, up, down. No tag names the first, and nothing in the block
    reads the last.
    """
    everything, kept, recomputed = (
        audit(traced(c)) for c in ({UNTAGGED: KEEP}, models.actions("keep"), {})
    )
    assert kept.matmuls - everything.matmuls == LAYERS
    assert recomputed.matmuls - kept.matmuls == 3 * LAYERS
    flops = BATCH * SEQUENCE * 2 * WIDTH * (2 * SEQUENCE + 2 * WIDTH)  # scores, probs @ n and up
    assert recomputed.matmul_flops - kept.matmul_flops == LAYERS * flops


@pytest.mark.quick(
    "keep-scanned",
    "recompute-unrolled",
    "compress-scanned",
    "offload-scanned",
    "compress_offload-unrolled",
    "everything-scanned",
)
@pytest.mark.parametrize("loss", [models.scanned, models.unrolled])
@pytest.mark.parametrize("action", [*ALL, "everything"])
def test_what_the_profile_predicts_is_what_is_traced(loss, action):
    target = dataclasses.replace(
        Target.parse("h200"), platform="rocm"
    )  # CUDA leaves offload out of unrolled layers
    made = profile(traced({}, loss).jaxpr, Pricing(target), Allowed(ALL))
    options = [(t.name, o.choice) for t in made.blocks[0].tags for o in t.options]
    priced = {name: choice for name, choice in options if choice.action == action}
    assert bool(priced) == (action not in ("recompute", "everything"))
    choices = {UNTAGGED: KEEP} if action == "everything" else priced
    predicted, found = evaluate(made, {"block": choices}), audit(traced(choices, loss))
    assert (found.saved_bytes, found.host_bytes) == (predicted.saved_bytes, predicted.host_bytes)
    recomputed = sum(b.runs * c.matmuls for b, c in zip(made.blocks, predicted.blocks))
    assert found.matmuls - audit(traced({UNTAGGED: KEEP}, loss)).matmuls == recomputed


def test_microbatches_run_more_often_and_hold_no_more():
    args = ARGS[0], models.batch(4, SEQUENCE, WIDTH, "float32")
    one, four = (audit(traced({}, args=args, microbatches=n)) for n in (1, 4))
    assert (one.saved_bytes, one.matmuls) == (4 * four.saved_bytes, four.matmuls // 4)


@pytest.mark.jax_defaults
@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_of_a_streamed_step_hold_no_more_than_those_of_a_resident_one(microbatches):
    """Its last one runs in a loop of its own, after the others."""
    tx = jaxmem.adama(1e-3, accumulation_steps=microbatches)
    plan = Assignment({"block": {"in": KEEP, "up": OFFLOAD}})
    step = tiny_lm.released(tx, plan=plan)
    state = jax.eval_shape(step.init, tiny_lm.parameters(np.float32))
    batch = jax.ShapeDtypeStruct((4 * microbatches, 9), np.int32)
    made = [jax.jit(step).trace(step.split(state, k), batch) for k in (0, 1, tiny_lm.LAYERS)]
    streamed, _, resident = map(audit, made)
    each = tiny_lm.LAYERS * 4 * 8 * tiny_lm.WIDTH * 4  # bytes of a tensor of the model's width
    assert streamed.saved_bytes >= each
    assert streamed.host_bytes == 2 * each
    # One class, as in a resident step, whose plan it takes.
    assert (streamed.blocks, resident.blocks) == (2, 1)
    assert dataclasses.replace(streamed, blocks=1) == resident
    classes = [block_classes(t.jaxpr) for t in made]
    for (found,) in classes:
        assert (found.layers, found.runs) == (tiny_lm.LAYERS, microbatches * tiny_lm.LAYERS)
        assert found.divisible == tiny_lm.LAYERS
    assert len(set(map(plan_fingerprint, classes))) == 1
    # Parameters are saved by no block, wherever they lie.
    assert len({found.everything_bytes for (found,) in classes}) == 1


def test_a_step_without_blocks_is_an_error():
    with pytest.raises(StepError, match="`traced` has no jax"):
        audit(jax.jit(lambda x: x * 2).trace(1.0))
