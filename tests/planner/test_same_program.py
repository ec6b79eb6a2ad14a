"""The program that was proven is the program that runs: `plan.step`, `auto(step, plan)`, `verify`,
and a plan that was saved and loaded, for steps with and without checkpoints of their own.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._core.versions import HOST_OFFSETS_SINCE, installed, release
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from tests.shared import plans
from tests.shared.marks import slow
from tests.shared.programs import program

pytestmark = pytest.mark.jax_defaults

LAYERS, WIDTH, ROWS = 8, 128, 2048
names = jax.checkpoint_policies.save_only_these_names
both = jax.checkpoint_policies.save_and_offload_only_these_names
OFFLOADS = "offload policy"
POLICIES = {
    "no checkpoint": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "policy by names": names("up"),
    OFFLOADS: both(
        names_which_can_be_saved=["up"],
        names_which_can_be_offloaded=["gate"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
LAYOUTS = ("scan", "Python loop", "nested scan")
SHARES = {"below": 0.8, "as written": 1.1, "between": None, "everything": 1.2}


def layer(x, w):
    up = checkpoint_name(x @ w["up"], "up")
    gate = checkpoint_name(jnp.tanh(x @ w["gate"]), "gate")
    return x + (gate * jax.nn.gelu(up)) @ w["down"]


def loss(layout: str, policy, w, x):
    one = layer
    if policy is not None:
        # XLA merges what an unrolled checkpoint makes again with the forward, unless kept from it.
        one = jax.checkpoint(layer, policy=policy, prevent_cse=layout == "Python loop")
    body = lambda x, w: (one(x, w), None)
    if layout == "scan":
        x, _ = jax.lax.scan(body, x, w)
    elif layout == "nested scan":
        pairs = jax.tree.map(lambda a: a.reshape(LAYERS // 2, 2, *a.shape[1:]), w)
        x, _ = jax.lax.scan(lambda x, pair: jax.lax.scan(body, x, pair), x, pairs)
    else:
        for i in range(LAYERS):
            x = one(x, jax.tree.map(lambda a, i=i: a[i], w))
    return (x**2).mean()


@functools.cache
def step_of(layout: str, policy: str):
    def step(w, x):
        gradients = jax.grad(functools.partial(loss, layout, POLICIES[policy]))(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients)

    return step


def shapes() -> tuple:
    shape = jax.ShapeDtypeStruct
    up = shape((LAYERS, WIDTH, 4 * WIDTH), jnp.float32)
    down = shape((LAYERS, 4 * WIDTH, WIDTH), jnp.float32)
    return {"up": up, "gate": up, "down": down}, shape((ROWS, WIDTH), jnp.float32)


def built(target: str, build):
    """What the step that `build` makes compiles to, and what runs it here."""
    with backend_for(Target.parse(target), workers=1) as backend:
        return backend.compile_fully(*trace(build, None, shapes())).result()


def total(target: str, build) -> int:
    return built(target, build).total_bytes


@functools.cache
def own_bytes(layout: str, policy: str, target: str) -> tuple[int | None, int]:
    """Of the step as written, None where XLA does not compile it, and without any checkpoint."""
    kept = total(target, lambda plan: step_of(layout, "no checkpoint"))
    try:
        return total(target, lambda plan: step_of(layout, policy)), kept
    except jaxmem.errors.StepError:
        # XLA loses the memory space of what nested loops offload.
        if (layout, policy) == ("nested scan", OFFLOADS) and target != "local":
            return None, kept
        raise


def budget(layout: str, policy: str, target: str, which: str) -> int:
    written, kept = own_bytes(layout, policy, target)
    written = written or kept // 2
    if which == "between":
        return (written + kept) // 2
    return int(SHARES[which] * (kept if which == "everything" else written))


def check_ways(layout: str, policy: str, target: str, which: str, tmp_path) -> jaxmem.Plan | None:
    """Plans the step, and compares what it compiles to in each way; None where nothing fits."""
    step, args, limit = step_of(layout, policy), shapes(), budget(layout, policy, target, which)
    try:
        plan = jaxmem.plan(jaxmem.auto(step), *args, budget=limit, target=target)
    except jaxmem.errors.BudgetError as error:
        plan, least = None, error.least_bytes
    if plan is None:
        assert which == "below", "a step with checkpoints, or without, fits"
        assert least > limit
        return None
    written, kept = own_bytes(layout, policy, target)
    loaded = plans.reloaded(plan, tmp_path)
    assert loaded == plan
    ways = {
        "plan": plan.compiled_bytes,
        "verify": jaxmem.verify(plan, jaxmem.auto(step), *args).compiled_bytes,
        "loaded": jaxmem.verify(loaded, jaxmem.auto(step), *args).compiled_bytes,
        "auto": total(target, lambda _: jaxmem.auto(step, plan)),
        "auto of the loaded": total(target, lambda _: jaxmem.auto(step, loaded)),
        "build": total(target, lambda _: jaxmem.auto(step)(loaded)),
    }
    assert max(ways.values()) <= limit, ways
    assert max(ways.values()) <= 1.01 * min(ways.values()), ways
    assert plan.baseline_bytes == pytest.approx(kept, rel=0.01)
    if written is None:
        assert plan.written is None
    if policy == "no checkpoint":
        assert plan.written is None
        assert plan.as_written == plan.keeps_everything
    elif plan.written is not None:
        assert plan.written.bytes == pytest.approx(written, rel=0.01)
        assert not (plan.as_written and plan.actions)
    return plan


@pytest.mark.core
@pytest.mark.parametrize(
    ("policy", "which"),
    [
        ("no checkpoint", "everything"),
        ("full", "as written"),
        slow("no checkpoint", "as written"),  # with nothing under a checkpoint, everything is kept
        slow("full", "everything"),
    ],
)
def test_every_way_is_the_same_program_here(policy, which, tmp_path):
    plan = check_ways("scan", policy, "local", which, tmp_path)
    assert plan is not None
    step, args = step_of("scan", policy), shapes()
    again = jax.jit(jaxmem.auto(step, plan), donate_argnums=0).lower(*args).compile()
    assert program(plan.step) == program(again)
    verified = jaxmem.verify(plan, jaxmem.auto(step), *args)
    assert program(verified.step) == program(again)
    assert verified.fingerprint == plan.fingerprint


CASES = [
    case
    for case in itertools.product(LAYOUTS, POLICIES, SHARES, ("local", "h200", "v5e"))
    # With nothing under a checkpoint, as written is everything kept.
    if not (case[1] == "no checkpoint" and case[2] in ("as written", "between"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "policy", "which", "target"), CASES)
def test_every_way_takes_the_same_bytes(layout, policy, which, target, tmp_path, recwarn, caplog):
    old = target == "h200" and release(installed("jaxlib") or "0") < HOST_OFFSETS_SINCE
    plan = check_ways(layout, policy, target, which, tmp_path)
    if plan is None:
        return
    if own_bytes(layout, policy, target)[0] is None:
        assert "the step as written is left out" in caplog.text
    elif policy == OFFLOADS and old:  # its gradients are wrong there
        assert plan.written is None
        assert any("wrong offsets" in str(w.message) for w in recwarn)
    elif policy != "no checkpoint":
        assert plan.written is not None


@pytest.mark.core
def test_what_fits_as_written_and_is_no_slower_otherwise_is_left_so():
    """The fastest of three: no plan, and not everything kept, but the author's own checkpoints."""
    step = step_of("scan", "policy by names")
    written, _ = own_bytes("scan", "policy by names", "local")
    plan = jaxmem.plan(jaxmem.auto(step), *shapes(), budget=written)
    assert plan.written is not None
    assert plan.compiled_bytes <= written
    text = str(plan)
    assert "as written" in text
    assert "everything kept" in text


@pytest.mark.core
@pytest.mark.todays_checkpoint
def test_assignments_that_leave_a_step_and_that_keep_everything_differ_in_checkpoints():
    own = functools.partial(loss, "scan", POLICIES["full"])
    w, x = (jax.tree.map(lambda a: jnp.ones(a.shape) * 0.01, arg) for arg in shapes())
    w = jax.tree.map(lambda a: a + 0.01 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), w)
    assert jaxmem.auto(own, Assignment.unchanged()) is own
    kept = jaxmem.auto(own, Assignment.everything())
    text = str(jax.make_jaxpr(jax.grad(kept))(w, x))
    assert "checkpoint" not in text
    assert "remat" not in text
    own_text = str(jax.make_jaxpr(jax.grad(own))(w, x))
    assert "checkpoint" in own_text or "remat" in own_text
    want, have = jax.grad(own)(w, x), jax.grad(kept)(w, x)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(have)):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * float(np.abs(a).max()))


@pytest.mark.core
def test_a_plan_that_is_priced_again_is_the_same_program():
    step, args = step_of("scan", "full"), shapes()
    for assignment in (Assignment.unchanged(), Assignment.everything(), Assignment.nothing()):
        priced = jaxmem.plans.price(jaxmem.auto(step), assignment, *args)
        assert priced.compiled_bytes == total("local", lambda _, a=assignment: jaxmem.auto(step, a))
        assert priced.as_written == assignment.as_written
        again = jaxmem.plans.price(jaxmem.auto(step), priced, *args)
        assert (again.compiled_bytes, again.actions) == (priced.compiled_bytes, priced.actions)
        assert again.written == priced.written
        assert again.written.bytes < again.baseline_bytes
    with pytest.raises(jaxmem.errors.TagError, match="estimate: `assignment` leaves the step as"):
        jaxmem.plans.estimate(jaxmem.auto(step), Assignment.unchanged(), *args)


@pytest.mark.core
def test_checkpoints_that_no_plan_decides_are_named():
    """Those of a model with policies of jaxmem, beside its blocks."""

    def build(plan):
        one = lambda x, w: (x + jnp.sin(jaxmem.tag(x @ w["up"], "up")) @ w["down"], None)
        block = jax.checkpoint(one, policy=jaxmem.remat_policy(plan), prevent_cse=False)
        head = jax.checkpoint(lambda x: (jnp.tanh(x) ** 2).mean())
        loss = lambda w, x: head(jax.lax.scan(block, x, w)[0])
        return lambda w, x: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    plan = jaxmem.plan(build, *shapes())
    (note,) = [note for note in plan.notes if "no plan decides" in note]
    assert "test_same_program.py" in note
    assert plan.written is None, "its blocks are decided however it is written"
    assert not plan.as_written
    without = jaxmem.plan(jaxmem.auto(step_of("scan", "full")), *shapes())
    assert not any("no plan decides" in note for note in without.notes)
