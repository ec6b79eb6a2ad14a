"""Plans for TPUs that are not there, from the profile to the proof."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import ALL, KEEP, Action
from jaxmem._core.assignment import Assignment
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from tests.shared import models, plans

pytestmark = [pytest.mark.jax_defaults, pytest.mark.slow]

LAYERS, ROWS, WIDTH = 4, 16384, 512
TAGS = ("in", "up", "half", "odd", "mask")


def layer(x_RD, w):
    x_RD = jaxmem.tag(x_RD, "in", kind="residual")
    up_RF = jaxmem.tag(x_RD @ w["up"], "up", kind="linear")
    mask_RF = jaxmem.tag(up_RF > 0, "mask", kind="mask")
    h_RF = jnp.where(mask_RF, jax.nn.gelu(up_RF), 0)
    half_RH = jaxmem.tag(h_RF @ w["half"], "half", kind="linear")
    odd_RO = jaxmem.tag(jnp.sin(half_RH) @ w["odd"], "odd", kind="linear")
    return x_RD + jnp.sin(odd_RO) @ w["back"]


SIZES = {"up": (WIDTH, 1024), "half": (1024, 256), "odd": (256, 200), "back": (200, WIDTH)}


build = models.build_in_float32(layer)


def arguments(rows=ROWS):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    return {k: shape(LAYERS, *s) for k, s in SIZES.items()}, shape(rows, WIDTH)


@pytest.fixture(scope="module")
def backend():
    with backend_for(Target.parse("v5e")) as found:
        yield found


@pytest.fixture(scope="module")
def made(backend):
    _, traced = trace(build, Assignment.nothing(), arguments())
    return profile(traced.jaxpr, backend, Allowed(ALL, ALL))


def compiled(backend, choices):
    traced = trace(build, Assignment({"block": choices}), arguments())
    return backend.compile_buffers(*traced).result()


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.COMPRESS_OFFLOAD])
def test_what_is_moved_is_on_the_host_to_the_byte(backend, made, action, tag):
    options = {t.name: t.options for b in made.blocks for t in b.tags}[tag]
    option = next(o for o in options if o.choice.action is action)
    found = compiled(backend, {tag: option.choice})
    assert found.host_bytes == LAYERS * option.host_bytes
    assert option.host_bytes > 0


def test_what_is_kept_is_in_the_buffers_to_the_byte(backend):
    """Of so many rows that no stack fits into a core."""
    rows, choices = 16 * ROWS + 8, dict.fromkeys(("in", "up", "odd"), KEEP)
    _, traced = trace(build, Assignment({"block": choices}), arguments(rows))
    _, bare = trace(build, Assignment.nothing(), arguments(rows))
    made = profile(bare.jaxpr, Pricing(backend.target), Allowed(ALL, ALL))
    _, peak = backend.explain(traced)
    found = [h for h in peak.held if h.kind == "temporary" and h.shape[:2] == (LAYERS, rows)]
    stacks = {h.shape[2]: h.bytes for h in found}
    options = {t.name: t.options for b in made.blocks for t in b.tags}
    kept = [next(o.device_bytes for o in options[t] if o.choice == KEEP) for t in choices]
    assert stacks == dict(zip((WIDTH, 2 * WIDTH, 200), (LAYERS * size for size in kept)))


@functools.cache
def ends():
    with pytest.raises(jaxmem.errors.BudgetError) as error:
        jaxmem.plan(build, *arguments(), budget="16MiB", target="v5e")
    return error.value.least_bytes


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_budgets_between(backend, share):
    most = backend.compile_buffers(*trace(build, None, arguments())).result().total_bytes
    budget = int(ends() + share * (most - ends()))
    plan = jaxmem.plan(build, *arguments(), budget=budget, target="v5e")
    assert plan.compiled_bytes <= budget
    assert plan.compiles <= 8
    assert abs(plan.predicted_bytes / plan.compiled_bytes - 1) < 0.03
    assert plan.time_source == "xla"
    assert plan.target == "v5e"


def test_a_plan_for_a_tpu_is_verified_from_its_file(tmp_path):
    plan = jaxmem.plan(build, *arguments(), budget=int(1.3 * ends()), target="v5e")
    loaded = plans.reloaded(plan, tmp_path)
    assert loaded.actions == plan.actions
    verified = jaxmem.verify(loaded, build, *arguments())
    assert verified.compiled_bytes == plan.compiled_bytes


@pytest.mark.parametrize("kept", [(), ("in",), TAGS])
def test_a_plan_is_no_slower_than_what_is_written_by_hand_at_its_bytes(backend, kept):
    """By the roofline of the whole step, which single changes are weighed by."""
    by_hand = compiled(backend, dict.fromkeys(kept, KEEP))
    budget = int(by_hand.total_bytes / (1 - backend.margin)) + 2**20
    plan = jaxmem.plan(build, *arguments(), budget=budget, target="v5e")
    assert plan.predicted_seconds < 1.01 * by_hand.xla_seconds
