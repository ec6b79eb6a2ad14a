"""Plans that say what is divided over devices: on several CPU devices, for GPUs that are not there,
and refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._model.states.places import DIVIDED
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem.errors import StepError, TargetError
from tests.shared import children, tiny_lm

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
ALL = ("actions", "states", "sharding")


ROOMY, TIGHT = "2MB", "750KB"


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU copies host stacks")
@pytest.mark.parametrize(
    "budgets", [(TIGHT,), pytest.param((ROOMY, TIGHT), marks=pytest.mark.slow)]
)
def test_four_devices_train_under_a_plan_as_one_does(budgets):
    four = children.printed(children.with_cpus(4), "tests.programs.planned_zero", *budgets)
    assert four["devices"] == 4
    for one in four["found"].values():
        assert one["compiled"] == one["verified"] <= one["budget"]
        assert one["far"] <= 1e-6
        np.testing.assert_allclose(*one["losses"], rtol=1e-5)
        assert "over devices: " in one["text"]
    # Within little, all states are divided.
    tight = four["found"][TIGHT]
    assert tight["divided"] in ("states", "layers")
    assert tight["compiled"] <= min(one["compiled"] for one in four["found"].values())


def build(plan, axis_name="data", **other):
    tx = jaxmem.adama(1e-3, accumulation_steps=2, axis_name=axis_name)
    return tiny_lm.released(tx, plan=plan, dtype=jnp.bfloat16, **other)


def shapes(build=build, layers=8, width=256):
    make = lambda: tiny_lm.parameters(np.float32, layers=layers, width=width, vocab=512)
    return jax.eval_shape(lambda: build(None).init(make()))


def tokens(rows):
    return jax.ShapeDtypeStruct((rows, 65), jnp.int32)


def plan_for(target, budget, build=build, **shaped):
    rows = 4 * jaxmem.plans.Target.parse(target).devices
    args = shapes(build, **shaped), tokens(rows)
    return jaxmem.plan(build, *args, target=target, budget=budget, decide=ALL)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 1), reason="jaxlib reads such stacks wrongly")
@pytest.mark.parametrize("target", ["h200:8", "a100-80gb:4x2", "rtx3090:4"])
def test_a_smaller_budget_divides_more_and_is_never_faster(target, tmp_path):
    find = functools.cache(lambda budget: plan_for(target, budget))
    roomy = find("1GiB")
    budgets = ["1GiB", roomy.compiled_bytes - 2**20, "9.5MiB"]
    plans = [find(budget) for budget in budgets]
    for plan in plans:
        assert plan.compiled_bytes <= plan.budget_bytes
        assert plan.divided in DIVIDED
        assert plan.lanes.seconds == pytest.approx(plan.predicted_seconds)
        if plan.host_bytes:
            assert plan.divided == "layers"
    assert plans[-1].divided == "layers"
    assert [p.predicted_seconds for p in plans] == sorted(p.predicted_seconds for p in plans)
    plans[-1].save(tmp_path / "plan.json")
    loaded = jaxmem.Plan.load(tmp_path / "plan.json")
    assert loaded == plans[-1]
    rows = 4 * jaxmem.plans.Target.parse(target).devices
    verified = jaxmem.verify(loaded, build, shapes(), tokens(rows))
    assert verified.compiled_bytes == plans[-1].compiled_bytes
    assert verified.host_bytes == plans[-1].host_bytes


def test_what_cannot_be_divided_is_refused():
    refuse = functools.partial(jaxmem.plan, target="h200:8", decide=ALL, budget="1GiB")
    without = functools.partial(build, axis_name=None)
    with pytest.raises(StepError, match="`axis_name` is None"):
        refuse(without, shapes(without), tokens(32))
    with pytest.raises(TargetError, match="expected several"):
        jaxmem.plan(build, shapes(), tokens(32), target="h200", decide=ALL)
    with pytest.raises(TargetError, match="'sharding' in `decide` too"):
        jaxmem.plan(build, shapes(), tokens(32), target="h200:8", decide=("actions", "states"))

    def within(plan):
        released = build(plan)
        step = lambda state, batch: (released(state, batch)[0], {})
        return released.within(step, get=lambda s: s, put=lambda _, pair: pair)

    with pytest.raises(StepError, match="within which another is called"):
        refuse(within, shapes(), tokens(32))
    with pytest.raises(StepError, match=r"`batch` has shape \(30, 65\).* divided over 8 devices"):
        refuse(build, shapes(), tokens(30))


@pytest.mark.slow
def test_a_way_to_divide_that_xla_refuses_takes_nothing_from_the_others(monkeypatch):
    compile_ = PlacedSteps.compile_fully
    refused = []

    def compile_some(self, assignment, places):
        if not refused:
            refused.append(self)
            raise StepError("XLA could not compile the step")
        return compile_(self, assignment, places)

    monkeypatch.setattr(PlacedSteps, "compile_fully", compile_some)
    how = {"target": "h200:8", "decide": ALL, "actions": ["keep"]}
    plan = jaxmem.plan(build, shapes(), tokens(32), budget="1GiB", **how)
    assert len(refused) == 1
    assert plan.divided in DIVIDED
