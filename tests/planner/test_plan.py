"""plan(): what it returns compiled within its budget, and what it refuses says why. The user's
Python runs once for each assignment that is estimated or compiled, and twice more at most,
since a step is traced with everything recomputed and as it is written.
"""

import concurrent.futures
import copy
import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.groups import keeps_everything
from jaxmem._planner import verify
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.history import History
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.running import StepRun
from jaxmem.errors import StepError
from tests.shared import models, plans
from tests.shared.programs import nbytes

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
SIZES = 4, 64, 8, 128  # layers, width, rows, sequence
SHAPES, SMALL = models.shapes(*SIZES), models.shapes(4, 32, 8, 64)
build, build_narrow = models.build_of(models.block), models.build_of(models.narrow)


@pytest.fixture(scope="module")
def unplanned(quick_compiles, own_database):
    return jaxmem.plan(build, *SHAPES)


@pytest.fixture(scope="module")
def halved(unplanned):
    return jaxmem.plan(build, *SHAPES, budget=int(0.4 * unplanned.baseline_bytes))


@pytest.fixture(scope="module")
def lossless(unplanned):
    budget = int(0.4 * unplanned.baseline_bytes)
    return jaxmem.plan(build, *SHAPES, budget=budget, actions=jaxmem.plans.LOSSLESS)


def compiled_bytes(plan):
    return nbytes(jax.jit(build(plan), donate_argnums=0).lower(*SHAPES).compile())


def test_with_room_everything_is_kept(unplanned):
    assert unplanned.actions["block"][UNTAGGED] == KEEP
    assert unplanned.compiles == 1
    assert unplanned.compiled_bytes == unplanned.baseline_bytes == compiled_bytes(None)
    text = lambda plan: jax.jit(build(plan), donate_argnums=0).lower(*SHAPES).as_text()
    assert text(unplanned) == text(None), "the program is the one without a plan"


def test_a_plan_compiles_within_its_budget(halved, unplanned):
    assert halved.compiled_bytes <= halved.budget_bytes == int(0.4 * unplanned.baseline_bytes)
    assert compiled_bytes(halved) == halved.compiled_bytes
    assert halved.compiles <= 6
    # The bound is for a toy model; benchmarks/budgets.py measures real models.
    assert abs(halved.predicted_bytes / halved.compiled_bytes - 1) < 0.25
    assert halved.parts.saved < unplanned.parts.saved
    assert halved.predicted_seconds >= unplanned.predicted_seconds > 0


def test_the_step_runs_and_trains_as_the_plain_one(halved, optimized, tmp_path):
    loaded = plans.reloaded(halved, tmp_path)
    assert loaded == halved
    with pytest.raises(jaxmem.errors.StepError, match="no executable"):
        _ = loaded.step
    verified = jaxmem.verify(loaded, build, *SHAPES)
    assert verified.compiled_bytes == halved.compiled_bytes
    _, want = jax.jit(build(None))(*models.arrays(*SIZES))
    _, got = verified.step(*models.arrays(*SIZES))
    assert got == want, "the loss is bit-equal: a plan changes nothing in the forward"


def test_a_lossless_plan_steps_as_the_plain_one(lossless):
    assert not any(c.action.names_codec for c in lossless.actions["block"].values())
    assert lossless.compiled_bytes <= lossless.budget_bytes
    want, _ = jax.jit(build(None))(*models.arrays(*SIZES))
    got, _ = lossless.step(*models.arrays(*SIZES))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


def test_nothing_of_the_models_size_is_allocated(own_database):
    before = sum(a.nbytes for a in jax.live_arrays())
    jaxmem.plan(build_narrow, *models.shapes(64, 256, 2, 16))
    assert sum(a.nbytes for a in jax.live_arrays()) <= before + 2**20


def test_more_budget_is_never_slower(unplanned, halved):
    within = lambda share: jaxmem.plan(build, *SHAPES, budget=int(share * unplanned.baseline_bytes))
    ordered = (within(0.36), halved, within(0.6), unplanned)
    for less, more in itertools.pairwise(ordered):
        # With more budget lossy codecs are dropped, for what times are uncertain by.
        dropped = bool(less.lossy) and not more.lossy
        assert more.predicted_seconds <= less.predicted_seconds or dropped
    exact = [p.predicted_seconds for p in ordered if not p.lossy]
    assert exact == sorted(exact, reverse=True)


def test_the_curve_goes_from_the_least_bytes_to_everything(halved, unplanned):
    for plan in (halved, unplanned):
        points = plan.pareto()
        assert [p.bytes for p in points] == sorted({p.bytes for p in points})
        assert [p.seconds for p in points] == sorted({p.seconds for p in points}, reverse=True)
        assert points[0].bytes < 0.4 * plan.baseline_bytes
        assert points[-1].bytes <= plan.baseline_bytes
        *others, last = points
        assert last.seconds == plan.baseline_seconds, "nothing is faster than everything kept"
        for point in others:
            assert point.actions["block"].keys() == {*models.TAGS}, "every tag is named"
        kept = [sum(c == KEEP for c in p.actions["block"].values()) for p in others]
        assert kept[0] == min(kept), "the least bytes"
        assert keeps_everything(last.actions) == (last.bytes == plan.baseline_bytes)
    within = [p.seconds for p in halved.pareto() if p.bytes <= 1.1 * halved.compiled_bytes]
    assert min(within) <= halved.predicted_seconds


def test_infeasible_budgets_name_the_least(own_database):
    with pytest.raises(jaxmem.errors.BudgetError, match="least that compiled") as caught:
        jaxmem.plan(build_narrow, *SHAPES, budget="1MiB")
    least = caught.value.least_bytes
    assert all(f"({bytes_} bytes)" in str(caught.value) for bytes_ in (2**20, least))
    plan = jaxmem.plan(build_narrow, *SHAPES, budget=least)
    assert 2**20 < plan.compiled_bytes <= least < plan.baseline_bytes


def test_a_copy_shares_the_executable_and_a_pickle_has_none(halved):
    copies = {"plan": halved}
    assert copy.deepcopy(copies)["plan"].step is halved.step
    read = pickle.loads(pickle.dumps(halved))
    assert read == halved
    assert not read.is_compiled
    assert jaxmem.verify(read, build, *SHAPES).is_compiled


def test_a_plan_that_stores_on_the_host_is_refused_under_a_known_fault(halved, monkeypatch):
    """As on a GPU whose XLA_FLAGS pipeline host transfers, with a plan from another machine."""
    monkeypatch.setattr(verify, "host_loop_fault", lambda target: "loops there read wrong values")
    assert jaxmem.verify(halved, build, *SHAPES).is_compiled, "no tensor is in host memory"
    compile_fully = StepCompiler.compile_fully

    def on_host(self, step):
        step = compile_fully(self, step)
        return dataclasses.replace(step, compiled=dataclasses.replace(step.compiled, host_bytes=1))

    monkeypatch.setattr(StepCompiler, "compile_fully", on_host)
    with pytest.raises(jaxmem.errors.TargetError, match="loops there read wrong values"):
        jaxmem.verify(halved, build, *SHAPES)


def test_a_plan_for_another_model_is_refused(halved):
    with pytest.raises(jaxmem.errors.PlanFileError, match="fingerprint"):
        jaxmem.verify(halved, build, *models.shapes(5, *SIZES[1:]))

    def renamed(x, p, key):
        return x + jnp.sin(jaxmem.tag(jnp.sin(x @ p["a"]), "other"))

    with pytest.raises(jaxmem.errors.PlanFileError, match=r"actions\.block\.\w+"):
        jaxmem.verify(halved, models.build_of(renamed), *SHAPES)
    with pytest.raises(jaxmem.errors.TagError, match="knows no block 'decoder'"):
        jaxmem.remat_policy(halved, block="decoder")


def test_a_step_planned_before_is_planned_from_what_it_compiled_to(unplanned, halved, monkeypatch):
    budget = int(0.45 * unplanned.baseline_bytes)
    monkeypatch.setattr("jaxmem._planner.search.history.History.recall", lambda _: [])
    from_nothing = jaxmem.plan(build, *SHAPES, budget=budget)
    monkeypatch.undo()
    again = jaxmem.plan(build, *SHAPES, budget=budget)
    assert again.compiles < from_nothing.compiles
    assert again.compiled_bytes <= budget
    assert again.predicted_seconds <= from_nothing.predicted_seconds
    error = lambda plan: abs(plan.predicted_bytes / plan.compiled_bytes - 1)
    assert error(again) <= 0.02
    assert again.step is not None


def test_what_cannot_be_read_of_earlier_plans_is_left_out(unplanned, monkeypatch):
    rows = [("not json", "{}"), ("null", '{"total_bytes": 3}'), ("3", "3")]
    rows.append(('{"block": {"h": ["forget", null]}}', "{}"))
    monkeypatch.setattr("jaxmem._core.database.Database.read_tried", lambda *_: rows)
    plan = jaxmem.plan(build, *SHAPES, budget=int(0.4 * unplanned.baseline_bytes))
    assert plan.compiled_bytes <= plan.budget_bytes


@pytest.fixture
def refusing(monkeypatch):
    """A set to which numbers of compiles are added, from 1, that fail as XLA's do."""
    refused, count = set(), [0]
    real = Local.compile_fully

    def compile_(self, stage, traced):
        count[0] += 1
        if count[0] not in refused:
            return real(self, stage, traced)
        failed = concurrent.futures.Future()
        failed.set_exception(StepError("XLA could not compile the step: INTERNAL"))
        return failed

    monkeypatch.setattr(Local, "compile_fully", compile_)
    monkeypatch.setattr(History, "recall", lambda self: [])  # each search is the first
    return refused


def test_another_plan_is_found(refusing):
    """The first compile is of everything kept, the second the first guess."""
    refusing |= {2, 4}
    plan = jaxmem.plan(build_narrow, *SMALL, budget="2MiB")
    assert plan.compiled_bytes <= 2 * 2**20
    assert not plan.keeps_everything
    assert plan.compiles > 4, "all of them were tried, and more"


def test_the_step_itself_has_to_compile(refusing):
    refusing.add(1)
    with pytest.raises(StepError, match="INTERNAL"):
        jaxmem.plan(build_narrow, *SMALL, budget="2MiB")


LAYERS = models.parameters(4, 32)
BATCH = models.batch(8, 16, 32)


class Runs:
    """Counts the runs of a step's Python, and stores the plans that `build` was called with."""

    def __init__(self):
        self.count, self.plans = 0, []

    def build(self, plan):
        """A step of tagged layers."""
        self.plans.append(plan)
        loss = models.scanned(jaxmem.remat_policy(plan), models.narrow)

        def step(params, batch):
            self.count += 1
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

        return step

    def step(self, params, batch):
        """A step without a tag."""
        self.count += 1
        layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)
        loss = lambda params: (jax.lax.scan(layer, batch, params)[0] ** 2).mean()
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    def during(self, call):
        """The result of a call, the runs in it, and how often `build` got each plan."""
        self.count, self.plans = 0, []
        result = call()
        return result, self.count, [self.plans.count(plan) for plan in self.plans]


@pytest.fixture(scope="module")
def kept() -> int:
    """Bytes of the tagged step with everything kept."""
    return jaxmem.plan(Runs().build, LAYERS, BATCH, budget="1GiB").baseline_bytes


@pytest.mark.todays_checkpoint  # else a step is traced once more, to run
def test_a_plan_traces_each_assignment_once(kept):
    runs = Runs()
    plan, count, _ = runs.during(lambda: jaxmem.plan(runs.build, LAYERS, BATCH, budget="1GiB"))
    assert plan.keeps_everything
    assert count == 2
    plan, count, often = runs.during(
        lambda: jaxmem.plan(runs.build, LAYERS, BATCH, budget=int(0.8 * kept))
    )
    assert not plan.keeps_everything
    assert set(often) == {1}
    assert count <= plan.compiles + 2

    verify = lambda: jaxmem.verify(plan, runs.build, LAYERS, BATCH)
    price = lambda: jaxmem.plans.price(runs.build, plan, LAYERS, BATCH)
    estimate = lambda: jaxmem.plans.estimate(runs.build, plan, LAYERS, BATCH)
    explain = lambda: jaxmem.explain(runs.build, LAYERS, BATCH, plan=plan)
    as_written = lambda: jaxmem.explain(runs.build, LAYERS, BATCH)
    counts = [runs.during(call)[1] for call in (verify, price, estimate, explain, as_written)]
    assert counts == [3, 3, 2, 2, 2]


@pytest.mark.todays_checkpoint  # else a step is traced once more, to run
def test_a_plan_of_a_step_without_tags_traces_each_assignment_once():
    runs, before = Runs(), Runs()
    unlimited = jaxmem.plan(jaxmem.auto(before.step), LAYERS, BATCH, budget="1GiB")
    budget = int(0.8 * unlimited.baseline_bytes)
    plan, count, _ = runs.during(
        lambda: jaxmem.plan(jaxmem.auto(runs.step), LAYERS, BATCH, budget=budget)
    )
    assert not plan.keeps_everything
    assert count <= plan.compiles + 2
    # `jaxmem.jit` looks for a stored plan by a trace, which the new plan does not make again.
    planned = jaxmem.jit(runs.step, budget, donate_argnums=0)
    arrays = lambda: jax.tree.map(jnp.array, LAYERS)
    _, count, _ = runs.during(lambda: planned(arrays(), BATCH))
    assert count <= planned.plan.compiles + 2
    again = jaxmem.jit(runs.step, budget, donate_argnums=0)
    _, count, _ = runs.during(lambda: again(arrays(), BATCH))
    assert count == 2
    assert again.plan.actions == planned.plan.actions


@jax.tree_util.register_pytree_node_class
class Checked:
    """A state whose constructor refuses leaves that are no arrays, as a class of a user may."""

    def __init__(self, layers):
        assert all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(layers)), layers
        self.layers = layers

    def tree_flatten(self):
        return (self.layers,), None

    @classmethod
    def tree_unflatten(cls, _, layers):
        return cls(*layers)


def test_a_state_may_check_its_leaves():
    runs = Runs()
    step = lambda state, x: Checked(runs.step(state.layers, x))
    planned = jaxmem.jit(step, "1GiB", donate_argnums=0)
    got = planned(Checked(jax.tree.map(jnp.array, LAYERS)), BATCH).layers
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(runs.step)(LAYERS, BATCH))
    shapes = jax.eval_shape(lambda: Checked(LAYERS))
    plan = jaxmem.plan(jaxmem.auto(step), shapes, BATCH, budget="1GiB")
    assert StepRun(plan.step, (shapes, BATCH))() > 0
    with pytest.raises(StepError, match=r"\['up'\] \(4, 32, 64\)"):
        jaxmem.plan(jaxmem.auto(lambda state, x: state.missing), shapes, BATCH)
