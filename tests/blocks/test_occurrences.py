"""Names that stand several times in a block, and tags inside its loops: what the profile predicts
is what is traced, to the byte, and gradients are the plain ones. The audit of a traced step against
the profile's prediction, and against sizes worked out by hand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import ALL, KEEP, OFFLOAD, RECOMPUTE, UNTAGGED, Action
from jaxmem._core.assignment import Assignment
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import block_classes, profile
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import JaxmemWarning, StepError, TagError
from tests.shared import compare, models, occurrences, tiny_lm
from tests.shared.audit import audit, loop_bytes
from tests.shared.marks import slow

LAYERS, WIDTH = 2, 16
BLOCKS = (*occurrences.TWINS, *occurrences.LOOPS)
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.__name__)


def arguments(dtype="float32"):
    return models.parameters(LAYERS, WIDTH, dtype), models.batch(2, 8, WIDTH, dtype)


def traced(block, choices):
    build = models.build_with(functools.partial(models.scanned, block=block))
    return trace(build, Assignment({"block": choices}), arguments())[1]


# XLA:GPU does not compile what a loop in a loop offloads; the programs are the same for any target.
TARGET = Pricing(dataclasses.replace(Target.parse("h200"), platform="rocm"))


@functools.cache
def profiled(block, target=TARGET):
    return profile(traced(block, {}).jaxpr, target, Allowed(ALL, ALL))


@pytest.mark.quick("twins", "recurrent", "chunked", "checkpointed", "counted", "decaying")
@each_block
def test_what_the_profile_predicts_is_what_is_traced(block):
    """Bytes of residuals and matrix products, under every assignment of keep and recompute, and
    under each other action. What a checkpoint inside the block repeats for itself belongs to its
    derivative.
    """
    made = profiled(block)
    (held,) = made.blocks
    assert held.layers == LAYERS
    alone = audit(traced(block, {UNTAGGED: KEEP})).matmuls
    own = LAYERS * 4 if block is occurrences.checkpointed else 0
    chosen = occurrences.assignments(held)
    assert {c.action for choices in chosen for c in choices.values()} >= {*ALL} - {Action.RECOMPUTE}
    for choices in chosen:
        predicted, found = evaluate(made, {"block": choices}), audit(traced(block, choices))
        again = sum(b.runs * c.matmuls for b, c in zip(made.blocks, predicted.blocks))
        sizes = predicted.saved_bytes, predicted.host_bytes
        assert (found.saved_bytes, found.host_bytes) == sizes, choices
        assert found.matmuls - alone == again + own, choices


@functools.cache
def gradients(block, action):
    policy = None
    if action is not None:
        (held,) = profiled(block).blocks
        options = {t.name: [o.choice for o in t.options] for t in held.tags}
        pick = lambda choices: next((c for c in choices if c.action == action), RECOMPUTE)
        policy = jaxmem.remat_policy(
            Assignment({"block": {name: pick(choices) for name, choices in options.items()}})
        )
    loss = models.scanned(policy, block)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arguments("float64"))


@pytest.mark.quick("keep-twins", "keep-recurrent", "keep-nested")
@each_block
@pytest.mark.parametrize("action", ["keep", *map(slow, ("recompute", "offload"))])
def test_lossless_gradients_are_the_plain_ones(block, action):
    got, want = gradients(block, action), gradients(block, None)
    read = [leaf for leaf in jax.tree.leaves(want) if np.abs(leaf).max() > 0]
    assert len(read) >= 3, "the loss, the input's gradient, and a parameter's at least"
    compare.close(got, want)


@pytest.mark.quick("compress-recurrent", "compress-attention")
@each_block
@pytest.mark.parametrize("action", ["compress", slow("compress_offload")])
def test_lossy_gradients_are_near_and_the_loss_exact(block, action):
    got, want = gradients(block, action), gradients(block, None)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-14)
    assert 0.8 < compare.cosine(got[1], want[1]) < 1 - 1e-9, "the codes are what the backward reads"


def test_occurrences_may_differ_in_shape_and_a_choice_is_open_to_all_or_none():
    def block(x, p, key):
        wide = jaxmem.tag(jnp.sin(x @ p["up"]), "h", kind="linear")
        odd = jaxmem.tag(wide > 0, "h")
        return x + jnp.where(odd, jnp.sin(wide), wide) @ p["down"]

    (held,) = profiled(block).blocks
    first, second = held.occurrences("h")
    assert {(t.dtype, t.kind) for t in (first, second)} == {("float32", "linear"), ("bool", None)}
    assert [o.choice.action for o in first.options] == [Action.KEEP, Action.OFFLOAD], (
        "no codec takes both numbers and a mask"
    )
    assert held.tag_bytes("h") == 2 * 8 * 32 * (4 + 1)


def test_each_place_may_have_a_kind_and_one_codec_serves_for_all():
    def block(x, p, key):
        h = jaxmem.tag(jnp.sin(x @ p["up"]), "h", kind="softmax")
        return x + jnp.sin(jaxmem.tag(jnp.sin(h), "h", kind="qkv")) @ p["down"]

    (held,) = profiled(block).blocks
    codecs = [{o.choice.codec for o in t.options} - {None} for t in held.occurrences("h")]
    assert codecs[0] == codecs[1]
    assert len(codecs[0]) == 2, "either kind's codec may be taken, for both"


def test_occurrences_that_ask_for_different_codecs_are_an_error():
    def block(x, p, key):
        h = jaxmem.tag(jnp.sin(x @ p["up"]), "h", codec="grouped_symmetric()")
        return x + jnp.sin(jaxmem.tag(jnp.sin(h), "h", codec="channelwise_symmetric()")) @ p["down"]

    with pytest.raises(TagError, match="tag 'h' occurs 2 times in a block, with codecs"):
        profiled(block)


def test_names_of_checkpoint_name_are_lossless_unless_asked():
    actions = lambda made: {o.choice.action for t in made.blocks[0].tags for o in t.options}
    by_default = profile(traced(occurrences.named_twins, {}).jaxpr, TARGET, Allowed(ALL))
    assert actions(by_default) == {Action.KEEP, Action.OFFLOAD}
    assert actions(profiled(occurrences.named_twins)) == {*ALL} - {Action.RECOMPUTE}


def test_the_seconds_of_copies_are_the_passes_without_the_codec():
    """A loop stacks the codes: keeping them takes two passes, and offloading them takes three."""
    tag = profiled(occurrences.named_twins).blocks[0].tags[0]
    by_action = {o.choice.action: o for o in tag.options}
    assert all(o.host_seconds == 0 for o in tag.options if not o.choice.action.offloads)
    away = by_action[Action.OFFLOAD]
    assert away.host_seconds == away.seconds > 0
    codes, moved = by_action[Action.COMPRESS], by_action[Action.COMPRESS_OFFLOAD]
    coding = 3 * codes.seconds - 2 * moved.seconds
    assert coding > 0
    assert moved.seconds - moved.host_seconds == pytest.approx(coding)


def test_offload_is_left_out_of_loops_where_it_does_not_compile():
    with pytest.warns(JaxmemWarning, match="offload is left out for the tags 'act', 'up'"):
        made = profiled(occurrences.chunked, Pricing(Target.parse("h200")))
    offloads = {
        t.name: any(o.choice.action.offloads for o in t.options) for t in made.blocks[0].tags
    }
    assert offloads == {"ln": True, "up": False, "act": False}


def test_the_fingerprint_tells_turns():
    of = lambda block: plan_fingerprint(block_classes(traced(block, {}).jaxpr))
    twice = lambda x, p, key: occurrences.chunked(jnp.concatenate([x, x]), p, key)[: x.shape[0]]
    assert of(occurrences.chunked) != of(twice)


def conditional(x, p, key):
    n = jaxmem.tag(models.norm(x), "ln")
    here = lambda n: jnp.sin(jaxmem.tag(jnp.sin(n @ p["up"]), "h")) @ p["down"]
    return x + jax.lax.cond(key > 1, here, jnp.cos, n)


def endless(x, p, key):
    n = jaxmem.tag(models.norm(x @ p["a"]), "ln")
    step = lambda c: (c[0] + 1, jnp.sin(jaxmem.tag(c[1] @ p["a"], "h")))
    done = jax.lax.while_loop(lambda c: c[0] < 3, step, (0, jax.lax.stop_gradient(n)))
    return x + jnp.sin(n * jax.lax.stop_gradient(done[1]))


def entangled(x, p, key):
    """What a turn hands on is read for the recomputation of another tag alone."""
    n = jaxmem.tag(models.norm(x @ p["a"]), "ln")

    def step(c, row):
        c = jaxmem.tag(c * 0.5 + jax.lax.stop_gradient(row), "h")
        return c, jnp.sin(row * jaxmem.tag(c + 1, "h"))

    _, rows = jax.lax.scan(step, jnp.zeros_like(n[:, 0]), jnp.moveaxis(n, 1, 0))
    return x + jnp.moveaxis(rows, 0, 1)


@pytest.mark.parametrize(
    ("block", "size", "said"),
    [
        (conditional, "2.0", "inside a branch of a conditional"),
        (endless, "1.0", "inside a while loop, of which JAX saves nothing"),
        (entangled, "2.0", "inside a loop of which each turn reads what the tag decides about"),
    ],
)
def test_where_nothing_is_decided_the_warning_says_so(block, size, said):
    told = rf"the tags 'h' \({size} KiB a layer\) of block 'block' stand {said}"
    with pytest.warns(JaxmemWarning, match=told):
        made = profiled.__wrapped__(block)
    assert [t.name for t in made.blocks[0].tags] == ["ln"]
    assert made.idle_tags == ()
    for choices in ({}, {"ln": KEEP}):
        found = audit(traced(block, choices))
        assert found.saved_bytes == evaluate(made, {"block": choices}).saved_bytes


DEPTH, BATCH, SEQUENCE, SIZE = 3, 2, 64, 64
FLOATS = BATCH * SEQUENCE * SIZE * 4  # bytes of one residual-stream tensor
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
    models.parameters(DEPTH, SIZE, "float32"),
    models.batch(BATCH, SEQUENCE, SIZE, "float32"),
)


def traced_model(choices, loss=models.scanned, args=ARGS, microbatches=1):
    return trace(
        models.build_with(loss, microbatches),
        None if choices is None else Assignment({"block": choices}),
        args,
    )[1]


@pytest.mark.parametrize("tag", models.TAGS)
def test_a_kept_tag_is_counted_as_its_bytes_times_layers(tag):
    chosen = {"in": KEEP, tag: KEEP}
    expected = DEPTH * sum(BYTES[t] for t in chosen)
    assert (audit(traced_model(chosen)).saved_bytes, audit(traced_model(chosen)).host_bytes) == (
        expected,
        0,
    )


def test_an_offloaded_tag_is_counted_in_host_memory():
    found = audit(traced_model({"in": KEEP, "up": OFFLOAD}))
    assert (found.saved_bytes, found.host_bytes) == (DEPTH * BYTES["in"], DEPTH * BYTES["up"])


@pytest.mark.parametrize("action", ["keep", "offload"])
def test_stacks_between_the_loops_are_the_saved_bytes(action):
    step = traced_model(models.actions(action))
    found = audit(step)
    assert loop_bytes(step.jaxpr.jaxpr) == found.saved_bytes + found.host_bytes > 0


def test_the_input_is_held_where_no_tag_is_kept():
    assert audit(traced_model({})).saved_bytes == DEPTH * BYTES["in"]


def test_products_that_are_recomputed_are_counted_by_layer():
    """Forward: n @ a, scores, probs @ n, up, down. No tag names the first, and nothing in the block
    reads the last.
    """
    everything, kept, recomputed = (
        audit(traced_model(c)) for c in ({UNTAGGED: KEEP}, models.actions("keep"), {})
    )
    assert kept.matmuls - everything.matmuls == DEPTH
    assert recomputed.matmuls - kept.matmuls == 3 * DEPTH
    flops = BATCH * SEQUENCE * 2 * SIZE * (2 * SEQUENCE + 2 * SIZE)  # scores, probs @ n and up
    assert recomputed.matmul_flops - kept.matmul_flops == DEPTH * flops


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
def test_what_the_profile_predicts_of_each_action_is_what_is_traced(loss, action):
    target = dataclasses.replace(
        Target.parse("h200"), platform="rocm"
    )  # CUDA leaves offload out of unrolled layers
    made = profile(traced_model({}, loss).jaxpr, Pricing(target), Allowed(ALL))
    options = [(t.name, o.choice) for t in made.blocks[0].tags for o in t.options]
    priced = {name: choice for name, choice in options if choice.action == action}
    assert bool(priced) == (action not in ("recompute", "everything"))
    choices = {UNTAGGED: KEEP} if action == "everything" else priced
    predicted, found = evaluate(made, {"block": choices}), audit(traced_model(choices, loss))
    assert (found.saved_bytes, found.host_bytes) == (predicted.saved_bytes, predicted.host_bytes)
    recomputed = sum(b.runs * c.matmuls for b, c in zip(made.blocks, predicted.blocks))
    assert found.matmuls - audit(traced_model({UNTAGGED: KEEP}, loss)).matmuls == recomputed


def test_microbatches_run_more_often_and_hold_no_more():
    args = ARGS[0], models.batch(4, SEQUENCE, SIZE, "float32")
    one, four = (audit(traced_model({}, args=args, microbatches=n)) for n in (1, 4))
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
