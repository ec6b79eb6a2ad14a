"""Plans that place states: run on the CPU, written and read, verified, and refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import Action
from jaxmem._cost.profile.options import Allowed
from jaxmem._model.states.places import Places
from jaxmem._planner.outcome import placed
from jaxmem._planner.placement.layer import Link
from jaxmem._planner.placement.plan import read_places
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._target.compile.backend import backend_for
from jaxmem.errors import BudgetError, OptimizerError, PlanFileError, StepError, TargetError
from jaxmem.plans import Target
from tests.shared import plans, tiny_lm
from tests.shared.streamed import apart, host_bytes

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
LAYERS, WIDTH, ROWS = 4, 128, 4
BOTH = ("actions", "states")
# Older XLA:CPUs copy host stacks: what streams there takes more than it spares.
STREAMS = jax.__version_info__ >= (0, 11)


def build(plan, microbatches=2):
    tx = jaxmem.adama(1e-2, accumulation_steps=microbatches)
    return tiny_lm.released(tx, plan=plan)


def params():
    return tiny_lm.parameters(np.float32, layers=LAYERS, width=WIDTH, vocab=32)


def first():
    return build(None).init(params())


def batch(seed=1):
    return tiny_lm.tokens(2 * ROWS, seed, vocab=32, sequence=16).astype(jnp.int32)


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@functools.cache
def planned(share: float):
    """A plan for a share of what the states take, made on this device."""
    budget = int(share * nbytes(first())) + 2**19
    return jaxmem.plan(build, first(), batch(), budget=budget, decide=BOTH)


def train_alike(plan, state, steps: int, build=build):
    """Asserts that a plan's step trains as the step without a plan. Returns their last states."""
    plain, other = jax.jit(build(None), donate_argnums=0), first()
    for _ in range(steps):
        state, found = plan.step(state, batch())
        other, wanted = plain(other, batch())
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-3)
    return state, other


def test_the_table_prices_choices_that_fit_the_free_part_of_the_budget(monkeypatch):
    priced = []

    def rows(problem, actions, *_):
        priced.append(problem.room - ActionSolution.of(problem, actions).saved_bytes)
        return ()

    monkeypatch.setattr(placed, "rows", rows)
    plan = jaxmem.plan(build, first(), batch(), budget="1GiB", decide=BOTH)
    assert plan.compiled_bytes < 2**28
    assert priced == [pytest.approx(2**30 - plan.compiled_bytes, rel=0.05)]


def test_a_plan_within_less_than_the_states_trains_as_the_step_without_one():
    if not STREAMS:
        with pytest.raises(BudgetError, match="streamed from host memory"):
            planned(0.6)
        return
    plan = planned(0.6)
    assert plan.compiled_bytes <= plan.budget_bytes < nbytes(first())
    assert 0 <= plan.places.persist < LAYERS
    state = plan.place(first())
    assert host_bytes(state) == plan.host_bytes > 0
    train_alike(plan, state, 4)
    assert "states: " + str(plan.places) in str(plan)
    assert plan.timeline().seconds == pytest.approx(plan.predicted_seconds)
    assert sum(group.count for group in plan.timeline().groups) == LAYERS
    assert plan.timeline().exposed_seconds > 0
    parts = plan.parts
    assert parts.arguments + parts.saved + parts.working == plan.compiled_bytes


def test_where_everything_fits_states_stay_on_the_device(tmp_path):
    plan = planned(40.0)
    assert plan.places == Places(LAYERS, LAYERS)
    assert plan.host_bytes == 0
    again = plans.reloaded(plan, tmp_path)
    assert again == plan
    assert again.timeline().seconds == pytest.approx(plan.predicted_seconds)
    assert [(g.count, g.place) for g in again.timeline().groups] == [(LAYERS, "resident")]
    assert again.timeline().exposed_seconds == 0
    assert jaxmem.plans.difference(plan, again).figures == {}
    with pytest.raises(StepError, match="was loaded, and knows no step"):
        again.place(first())
    verified = jaxmem.verify(again, build, first(), batch())
    assert verified.compiled_bytes == plan.compiled_bytes
    _, metrics = verified.step(verified.place(first()), batch())
    assert np.isfinite(metrics["loss"])


def clipped(plan):
    tx = jaxmem.adama(1e-2, accumulation_steps=2)
    return tiny_lm.released(tx, plan=plan, clip=("norm", 0.05))


def test_a_plan_for_a_step_that_clips_by_the_norm_has_a_pass_more(tmp_path):
    budget = int((0.6 if STREAMS else 40.0) * nbytes(first())) + 2**19
    plan = jaxmem.plan(clipped, first(), batch(), budget=budget, decide=BOTH)
    assert plan.compiled_bytes <= budget
    assert (plan.places.persist < LAYERS) == STREAMS
    state, _ = train_alike(plan, plan.place(first()), 3, clipped)
    _, metrics = plan.step(state, batch())
    assert metrics["grad_norm"] > 0.05, "it clips"
    made = plan.timeline()
    assert made.seconds == pytest.approx(plan.predicted_seconds)
    seconds = made.outside_seconds + made.alone_seconds
    for group in made.groups:
        assert group.norm.lanes["compute"] == group.last.lanes["compute"] > 0
        first_backwards = group.norm.seconds, group.norm.seconds, group.backward.seconds
        passes = 2 * group.forward.seconds, *first_backwards, group.last.seconds
        seconds += group.count * sum(passes)
    assert plan.predicted_seconds == pytest.approx(seconds)
    assert "backward for the norm, 2 times" in str(made)
    assert plans.reloaded(plan, tmp_path) == plan


def counted(plan, microbatches=2):
    """A step with a state of its own, which holds the pair and counts."""
    released = build(plan, microbatches)

    def step(state, batch):
        pair, metrics = released(state["pair"], batch)
        return {"pair": pair, "count": state["count"] + 1}, metrics

    put = lambda state, pair: {**state, "pair": pair}
    return released.within(step, get=lambda state: state["pair"], put=put)


def first_counted():
    return {"pair": first(), "count": jnp.zeros((), jnp.int32)}


@functools.cache
def planned_counted():
    budget = int((0.6 if STREAMS else 40.0) * nbytes(first())) + 2**19
    return jaxmem.plan(counted, first_counted(), batch(), budget=budget, decide=BOTH)


def test_a_state_that_holds_more_than_a_pair_is_placed_and_trains_alike():
    plan = planned_counted()
    if STREAMS:
        assert plan.places == planned(0.6).places
    state = plan.place(first_counted())
    assert host_bytes(state) == plan.host_bytes
    assert (plan.host_bytes > 0) == STREAMS
    state, other = train_alike(plan, state, 3)
    assert int(state["count"]) == 3
    # The form that no placement changes, beside what is no part of the pair.
    whole = counted(None).joined(state)
    shape = lambda a: (a.shape, a.dtype)
    assert jax.tree.map(shape, whole["pair"]) == jax.tree.map(shape, other)
    assert int(whole["count"]) == 3


@pytest.mark.quick("ways1", "local")
@pytest.mark.parametrize("ways", [None, (4e9, 3e9), "local"])
def test_states_are_priced_by_what_was_measured_of_each_way(ways, monkeypatch):
    """A CPU measures its copies, which run beside no work."""
    monkeypatch.setattr("jaxmem._target.compile.backend.measured_link", lambda: (4e9, 3e9))
    target, expected = Target.parse("local"), Link(4e9, 3e9, beside=False)
    if ways != "local":
        target = dataclasses.replace(Target.parse("rtx4090"), link=5e9, link_ways=ways)
        expected = Link(*(ways or (5e9, 5e9)))
    limits = Limits(target.usable_bytes, target.usable_bytes, target.host_bytes)
    kept = (Action.KEEP,)
    with backend_for(target) as backend:
        search = read_places((build, (first(), batch()), backend, limits, Allowed(kept, kept)))
    assert search.problem.link == expected


@pytest.mark.slow
def test_the_number_of_microbatches_is_decided_too():
    """Within what one microbatch does not fit, of those that divide the batch of 4."""
    many = lambda rows: tiny_lm.tokens(rows, vocab=32, sequence=256).astype(jnp.int32)
    decide = ("actions", "states", "microbatches")
    one = jaxmem.plan(functools.partial(build, microbatches=1), first(), many(4), decide=BOTH)
    budget = int(0.7 * one.compiled_bytes)
    plan = jaxmem.plan(build, first(), many(4), budget=budget, decide=decide)
    assert plan.microbatches in (1, 2, 4)
    assert plan.compiled_bytes <= budget
    assert plan.places is not None
    with pytest.raises(StepError, match="expected `microbatches`, such as"):
        jaxmem.plan(build, first(), budget=budget, decide=decide)


def test_a_first_state_is_made_where_the_plan_says():
    plan = planned(0.6 if STREAMS else 40.0)
    layer, outer = apart(params())
    made = plan.create(jax.tree.map(jnp.copy, outer), layer)
    placed = plan.place(first())
    where = lambda a: (a.shape, a.dtype, a.sharding.memory_kind)
    assert jax.tree.map(where, made) == jax.tree.map(where, placed)
    jax.tree.map(np.testing.assert_array_equal, made, placed)
    _, metrics = plan.step(made, batch())
    assert np.isfinite(metrics["loss"])
    with pytest.raises(StepError, match="holds more than the released step's pair"):
        planned_counted().create({}, lambda i: {})


def test_the_plan_of_another_model_is_refused_by_its_layers(tmp_path):
    other = plans.plan(target="local", places=Places(2 * LAYERS, LAYERS))
    with pytest.raises(PlanFileError, match="`places.layers` is 8, and the model has 4"):
        jaxmem.verify(plans.reloaded(other, tmp_path), build, first(), batch())


def idle_head(outer, x, batch, *, plan):
    """A head with a block that no gradient runs through."""
    idle = jax.checkpoint(jnp.tanh, policy=jaxmem.remat_policy(plan, block="idle"))
    return tiny_lm.head(outer, x, batch) + 0 * idle(jax.lax.stop_gradient(x)).sum()


@pytest.mark.quick("2")
@pytest.mark.parametrize("layers", [1, 2])
def test_shapes_are_planned_for_here_and_idle_blocks_are_named(layers):
    tx = jaxmem.adama(1e-2)

    def build(plan):
        head = functools.partial(idle_head, plan=plan)
        ends = tiny_lm.embed, tiny_lm.block, head
        return jaxmem.released_step(tx, *ends, layers="blocks", plan=plan)

    make = functools.partial(tiny_lm.parameters, np.float32, layers=layers, width=16, vocab=32)
    shapes = jax.eval_shape(lambda: build(None).init(make()))
    tokens = jax.ShapeDtypeStruct((4, 17), jnp.int32)
    plan = jaxmem.plan(build, shapes, tokens, budget="1GiB", decide=BOTH)
    assert "idle" in plan.actions
    assert plan.places == Places(layers, layers)
    state = plan.place(build(None).init(make()))
    _, metrics = plan.step(state, tiny_lm.tokens(4, vocab=32, sequence=16).astype(jnp.int32))
    assert np.isfinite(metrics["loss"])


def test_a_plan_without_places_places_nothing():
    plan = jaxmem.plan(build, first(), batch())
    with pytest.raises(StepError, match="this plan places no states"):
        plan.place(first())


def test_a_budget_below_the_least_is_refused_with_the_least():
    with pytest.raises(BudgetError, match="the least that is expected to compile is") as error:
        jaxmem.plan(build, first(), batch(), budget=2**16, decide=BOTH)
    assert 2**16 < error.value.least_bytes < nbytes(first()) * 2
    with pytest.raises(BudgetError, match="`host_budget` 1.0 KiB"):
        jaxmem.plan(build, first(), batch(), budget=2**20, host_budget=2**10, decide=BOTH)


@pytest.mark.parametrize("decide", [("states",), ("actions", "sharding"), "nothing", (), None])
def test_what_cannot_be_decided_is_refused(decide):
    with pytest.raises(StepError, match="plan: `decide` is"):
        jaxmem.plan(build, first(), batch(), decide=decide)


def test_what_is_no_released_step_is_refused():
    plain = lambda plan: jax.jit(build(plan))
    args = first(), batch()
    for error, message, asked, options in (
        (StepError, "expected what jaxmem.released_step returns", (plain, *args), {}),
        (StepError, "plan: got no arguments", (build,), {}),
        (OptimizerError, "state", (build, first()[0], batch()), {}),
        (StepError, "expected measure=None", (build, *args), {"measure": 1.0}),
        (TargetError, "expected one device", (build, *args), {"target": "h200:8"}),
    ):
        with pytest.raises(error, match=message):
            jaxmem.plan(*asked, decide=BOTH, **options)
