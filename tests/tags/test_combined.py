"""A plan's policy in `jax.checkpoint_policies.save_from_both_policies`: a value that either policy
saves is saved, and the plan decides about the others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem._core.actions import ALL, KEEP, OFFLOAD, Choice
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._model.tags.combined import parts
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import JaxmemWarning, TagError
from jaxmem.plans import Assignment
from tests.shared import compare, models
from tests.shared.audit import audit
from tests.shared.programs import nbytes

both = jax.checkpoint_policies.save_from_both_policies
only = jax.checkpoint_policies.save_only_these_names
dots = jax.checkpoint_policies.dots_saveable
COMPRESS, HOST_CODES = (
    Choice(action, models.CODEC["in"]) for action in ("compress", "compress_offload")
)
LAYERS, BATCH, WIDTH = 3, 8, 64
ONE = BATCH * WIDTH * 8  # bytes of a float64 tensor (BATCH, WIDTH)
UNROLLED = pytest.mark.filterwarnings("ignore:jaxmem. offload is left out for block")

FORMS = {
    "first": lambda ours, other: both(ours, other),
    "last": lambda ours, other: both(other, ours),
    "nested": lambda ours, other: both(both(only("absent"), ours), both(other, only("other"))),
    "twice": lambda ours, other: both(both(ours, other), ours),
}


def layer(x, w, key):
    """x (BATCH, WIDTH): `in` has this shape, and `up`, `act` and `gate` are twice as wide."""
    x = jaxmem.tag(x, "in")
    up = checkpoint_name(x @ w["up"], "up")
    act = checkpoint_name(jnp.sin(up), "act")
    return x + jaxmem.tag(jnp.sin(act) * act, "gate") @ w["down"]


scanned, unrolled = (
    functools.partial(loss, block=layer) for loss in (models.scanned, models.unrolled)
)


def arguments(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / WIDTH**0.5, dtype)
    w = {"up": make(LAYERS, WIDTH, 2 * WIDTH), "down": make(LAYERS, 2 * WIDTH, WIDTH)}
    return w, make(BATCH, WIDTH) * WIDTH**0.5


def build_of(form, other, loss=scanned):
    return models.build_with(lambda ours: loss(form(ours, other)))


def traced(build, choices):
    with todays_checkpoint():
        return trace(build, Assignment({"block": choices}), arguments())[1]


def profiled(build):
    jaxpr = traced(build, {}).jaxpr
    return profile(jaxpr, Pricing(Target.parse("h200")), Allowed(ALL, ALL))


assert_equal = functools.partial(compare.nonzero, atol=1e-14)


def test_the_parts_of_a_combination():
    ours, other = jaxmem.remat_policy(Assignment({"block": {"in": KEEP}})), only("up")
    for form in FORMS.values():
        found = parts(form(ours, other))
        assert found.count(ours) == found.count(other) == 1
    assert parts(both(both(dots, ours), other)) == [dots, ours, other]
    hidden = lambda *args, **params: ours(*args, **params)
    for alone in (ours, other, hidden, None, functools.partial(ours)):
        assert parts(alone) == [alone]


@UNROLLED
@pytest.mark.parametrize("loss", [scanned, unrolled])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_the_other_policy_saves_is_part_of_the_block(form, loss):
    """`up` has twice the bytes of the layer's input. It is saved under every plan, and the backward
    recomputes one product less.
    """
    combined, alone = build_of(form, only("up"), loss), build_of(lambda ours, _: ours, None, loss)
    made, before = profiled(combined), profiled(alone)
    assert {t.name for b in made.blocks for t in b.tags} == {"in", "act", "gate"}
    assert {t.name for b in before.blocks for t in b.tags} == {"in", "up", "act", "gate"}
    for choices in ({}, {"act": KEEP}, {"gate": KEEP, "act": OFFLOAD} if loss is scanned else {}):
        found = audit(traced(combined, choices))
        cost = evaluate(made, {"block": choices})
        kept = audit(traced(alone, choices | {"up": KEEP}))
        assert (found.saved_bytes, found.host_bytes) == (cost.saved_bytes, cost.host_bytes)
        assert (found.saved_bytes, found.host_bytes) == (kept.saved_bytes, kept.host_bytes)
        assert found.matmuls == kept.matmuls
    inputs = LAYERS if loss is scanned else LAYERS - 1  # the first input is the step's argument
    assert audit(traced(combined, {})).saved_bytes == (2 * LAYERS + inputs) * ONE
    priced = [evaluate(made, {"block": {}}).seconds, evaluate(before, {"block": {}}).seconds]
    assert priced[0] < priced[1], "a product is not repeated"


@UNROLLED
@pytest.mark.parametrize("loss", [scanned, unrolled])
def test_values_without_a_name_that_the_other_policy_saves(loss):
    build = build_of(both, dots, loss)
    made = profiled(build)
    for choices in ({}, {"in": KEEP}, {"act": KEEP}, {"up": COMPRESS}):
        found = audit(traced(build, choices))
        assert found.saved_bytes == evaluate(made, {"block": choices}).saved_bytes
    products = [b.matmuls for b in (audit(traced(build, {})), audit(traced(build, {"up": KEEP})))]
    assert products[0] == products[1], "the product under `up` is saved"


@pytest.mark.parametrize("choice", [KEEP, OFFLOAD, COMPRESS, HOST_CODES], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_value_that_the_other_policy_saves_is_saved_as_it_is(form, choice):
    """A plan's codec or offload of the value has no effect: its bytes are on the device, and the
    gradient is exact.
    """
    build = build_of(form, only("up"))
    assert_equal(build(Assignment({"block": {"up": choice}}))(*arguments()), plain())
    found = audit(traced(build, {"up": choice}))
    assert (found.saved_bytes, found.host_bytes) == (LAYERS * 3 * ONE, 0)


@functools.cache
def plain():
    return build_of(lambda ours, other: None, None)(None)(*arguments())


@pytest.mark.parametrize(
    ("form", "name"), [("first", "act"), ("last", "gate"), ("nested", "in"), ("twice", "act")]
)
def test_a_plan_decides_about_the_other_values(form, name):
    form = FORMS[form]
    build = build_of(form, only("up"))
    for choice in (KEEP, OFFLOAD):
        assert_equal(build(Assignment({"block": {name: choice}}))(*arguments()), plain())
    size = ONE if name == "in" else 2 * ONE
    assert audit(traced(build, {name: OFFLOAD})).host_bytes == LAYERS * size
    alone = build_of(lambda ours, _: ours, None)
    compressed = Assignment({"block": {name: COMPRESS}})
    lossy = build(compressed)(*arguments())
    assert_equal(lossy, alone(Assignment({"block": {name: COMPRESS, "up": KEEP}}))(*arguments()))
    assert compare.farthest(lossy, plain()) > 1e-9, "the backward reads the codes"


def stage(x, w):
    """A pipeline's stage as MaxText's: layers in a scan, and a name of its input."""
    x = checkpoint_name(x, "stage_input")

    def one(x, w):
        up = checkpoint_name(x @ w["up"], "up")
        return x + jaxmem.tag(jax.nn.gelu(up), "gelu", kind="gelu") @ w["down"], None

    return jax.lax.scan(one, x, w)[0]


def pipeline(policy):
    """Stages run together, under one checkpoint, in each iteration over the microbatches."""
    stages = jax.vmap(stage)
    if policy is not None:
        stages = jax.checkpoint(stages, policy=policy, prevent_cse=False)

    def loss(w, microbatches):
        def iteration(held, microbatch):
            held = stages(jnp.roll(held, 1, 0).at[0].set(microbatch), w)
            return held, held[-1]

        start = jnp.zeros((2, *microbatches.shape[1:]), microbatches.dtype)
        return (jax.lax.scan(iteration, start, microbatches)[1][1:] ** 2).mean()

    return loss


def pipeline_arguments():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 8)
    return {"up": make(2, 2, 32, 128), "down": make(2, 2, 128, 32)}, make(6, 64, 32)


@pytest.mark.filterwarnings("default::jaxmem.errors.JaxmemWarning")
@pytest.mark.standard_promotion
def test_a_pipeline_is_planned_with_its_stages_inputs_saved():
    args, save_input = pipeline_arguments(), only("stage_input")
    build = build_of(both, save_input, pipeline)
    whole = jaxmem.plan(build, *args, budget="1GiB")
    budget = int(0.65 * whole.baseline_bytes)
    plan = jaxmem.plan(build, *args, budget=budget, actions=jaxmem.plans.LOSSLESS)
    assert plan.compiled_bytes <= budget
    compiled = jax.jit(build(plan), donate_argnums=0).lower(*args).compile()
    assert plan.compiled_bytes == nbytes(compiled)
    estimate = jaxmem.plans.estimate(build, Assignment(plan.actions), *args)
    assert estimate.bytes == pytest.approx(plan.compiled_bytes, rel=0.15)
    assert {row.tag for row in plan.rows} == {"up", "gelu"}, "not `stage_input`"
    plain = build_of(lambda ours, other: None, None, pipeline)(None)
    assert_equal(build(plan)(*args), plain(*args))


def test_names_that_the_other_policy_saves_are_not_warned_of(recwarn):
    made = profiled(build_of(both, only("up")))
    assert made.idle_tags == ("up",)
    assert not [w for w in recwarn if issubclass(w.category, JaxmemWarning)]


def test_several_policies_of_jaxmem_are_refused():
    def build(plan, label="other"):
        ours, other = jaxmem.remat_policy(plan), jaxmem.remat_policy(plan, block=label)
        return build_of(lambda *_: both(ours, both(dots, other)), None)(None)

    with pytest.raises(TagError, match="several jaxmem policies, of the labels 'block', 'other'"):
        jaxmem.plan(build, *arguments())
    same = functools.partial(build, label="block")
    assert {t.name for t in profiled(same).blocks[0].tags} == {"in", "up", "act", "gate"}
