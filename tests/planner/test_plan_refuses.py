"""What plan() warns of, and what it refuses: the argument, and what is wrong with it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem._core.actions import Action
from jaxmem._core.bytes import show_bytes
from jaxmem.errors import BudgetError
from tests.shared import models
from tests.shared.plans import plan as small
from tests.shared.refused import refused

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]
SHAPES = models.shapes(4, 64, 8, 128)
build = models.build_of(models.block)


def test_idle_tags_are_told():
    def block(x, p, key):
        return x + jaxmem.tag(jnp.sin(jaxmem.tag(x @ p["a"], "h")) @ p["a"], "last")

    loss = lambda policy: lambda p, x: jaxmem.tag(models.scanned(policy, block)(p, x), "loss")
    for name, made in {"last": models.build_of(block), "loss": models.build_with(loss)}.items():
        with pytest.warns(jaxmem.errors.JaxmemWarning, match=f"'{name}'"):
            jaxmem.plan(made, *SHAPES)


def test_tags_that_auto_chose_are_not_told():
    """Wasted and idle tags in a block with a label that `jaxmem.auto` gives: a warning, which would
    be an error here, would tell the user to move tags that are not the user's.
    """

    def block(x, p, key):
        x = jaxmem.tag(x, "in")
        x = x + jaxmem.tag(jax.nn.softmax(x @ p["a"]), "late") @ p["a"]
        return x + jaxmem.tag(jnp.sin(jaxmem.tag(x @ p["a"], "h")) @ p["a"], "last")

    def build(plan):
        loss = models.scanned(jaxmem.remat_policy(plan, block="auto"), block)
        return lambda p, x: jax.tree.map(lambda a, g: a - g, p, jax.grad(loss)(p, x))

    assert jaxmem.plan(build, *SHAPES).keeps_everything


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budget": 0}, jaxmem.errors.BudgetError, "`budget` is 0"),
        ({"budget": "120%"}, jaxmem.errors.BudgetError, "more than all"),
        ({"host_budget": "x"}, jaxmem.errors.BudgetError, "`host_budget` is 'x'"),
        ({"target": "h2000"}, jaxmem.errors.TargetError, "h200"),
        ({"target": 3}, jaxmem.errors.TargetError, "int"),
        ({"actions": ["keep", "forget"]}, jaxmem.errors.TagError, "forget"),
        ({"actions": []}, jaxmem.errors.TagError, "at least one action"),
        ({"actions": [Action.OFFLOAD]}, jaxmem.errors.TargetError, "no host memory"),
        ({"codecs": "grouped_symetric()"}, jaxmem.errors.TagError, "grouped_symmetric"),
        ({"codecs": 5}, jaxmem.errors.TagError, "`codecs` is 5; expected a codec"),
        ({"codecs": {"gelu": None}}, jaxmem.errors.TagError, "`codecs` is {'gelu': None}"),
        ({"codecs": {"geluu": "bit_mask"}}, jaxmem.errors.TagError, "`kind` is 'geluu'"),
        ({"fresh": "no"}, jaxmem.errors.StepError, "`fresh` is 'no'; expected True or False"),
        ({"microbatches": 3}, jaxmem.errors.StepError, "`microbatches` is 3; expected whole"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        jaxmem.plan(build, *SHAPES, **arguments)


@refused(
    jaxmem.errors.StepError,
    (lambda: jaxmem.verify("plan.json", build, *SHAPES), "verify: `plan` is str; expected a plan"),
    (
        lambda: jaxmem.explain(build, *SHAPES, plan="a"),
        r"explain: `plan` is str; .*Plan.load\(path",
    ),
    (lambda: jaxmem.plans.report("plan.json", "page.html"), "report: `plan` is str"),
    (lambda: jaxmem.plans.difference(small(), None), "difference: `second` is NoneType"),
    (lambda: jaxmem.plans.difference("a", "b"), "difference: `first` is str"),
)
def test_a_path_is_no_plan(call):
    call()


@refused(
    jaxmem.errors.StepError,
    (jax.jit(jnp.sin), "`compiled` is PjitFunction; expected a compiled step"),
    (None, "`compiled` is NoneType"),
)
def test_a_step_that_is_not_compiled_has_no_bytes(step):
    jaxmem.plans.compiled_bytes(step)


def test_a_hopeless_budget_is_refused_before_anything_is_timed_or_compiled(monkeypatch):
    arguments = sum(a.size * 4 for a in jax.tree.leaves(SHAPES))
    with monkeypatch.context() as patch:
        never = lambda *_, **__: pytest.fail("a compile was asked for")
        patch.setattr("jaxmem._planner.search.compile.StepCompiler.try_compile_buffers", never)
        patch.setattr("jaxmem._target.compile.backend.measure_all", never)
        with pytest.raises(BudgetError, match="arguments alone take") as caught:
            jaxmem.plan(build, *SHAPES, budget=arguments - 1)
        assert f"({arguments} bytes) for target 'local'" in str(caught.value)
        assert caught.value.least_bytes == arguments
        some = lambda plan, microbatches: build(plan)
        with pytest.raises(BudgetError, match="none of 1, 2 microbatches fits; .*alone"):
            jaxmem.plan(some, *SHAPES, budget="1KiB", microbatches=(1, 2))


def test_a_budget_beyond_the_machine_is_noted():
    usable = jaxmem.plans.Target.parse("local").usable_bytes
    plan = jaxmem.plan(models.build_of(models.narrow), *SHAPES, budget=usable + 2**30)
    assert any("on this machine can use" in note for note in plan.notes)
    assert "note: the budget is" in str(plan)


@refused(
    jaxmem.errors.StepError,
    (3, "`build` is int"),
    (jax.jit(lambda plan: plan), "`build` is a jitted function"),
    (lambda plan: None, "returned NoneType"),
    (lambda plan: lambda p: p, "cannot be traced"),
    (lambda plan: lambda p, x: (p, x), "no block"),
)
def test_wrong_steps(builder):
    jaxmem.plan(builder, *SHAPES)


def test_arguments_that_exceed_a_budget_are_told_with_what_would_spare_bytes():
    """Adam's moments are twice the parameters: halved, they spare as much as these take."""
    tx = optax.adam(1e-3)
    params = {"w": jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)}
    size = 4 * 4 * 256 * 256
    state = params, jax.eval_shape(tx.init, params)

    def step(state, x):
        params, moments = state
        loss = lambda p: (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]).mean()
        updates, moments = tx.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    with pytest.raises(BudgetError, match="arguments alone take") as caught:
        jaxmem.plan(jaxmem.auto(step), state, batch, budget=size, target="h200")
    assert caught.value.least_bytes == pytest.approx(3 * size, rel=0.01)
    message = str(caught.value)
    for what, spared in {
        "decide=('actions', 'states') keeps states of layers in host memory: up to": 3 * size,
        "data_parallel divides states over 8 devices: up to": 3 * size - 3 * size // 8,
        "moments in bfloat16:": size,
        "more microbatches:": 0,
    }.items():
        assert f"{what} {show_bytes(spared)} less" in message
