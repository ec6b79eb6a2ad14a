"""Plans that may store an optimizer's moments in 8 bits: when they do, and what steps train."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._model.states.places import Places
from jaxmem._planner.microbatches import fastest_plan
from jaxmem.errors import BudgetError, OptimizerError, PlanFileError, StepError, TagError
from tests.planner.placed.test_placed import (
    BOTH,
    LAYERS,
    STREAMS,
    batch,
    counted,
    first_counted,
    params,
)
from tests.shared import plans, tiny_lm
from tests.shared.streamed import apart, close, host_bytes

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]

OPTIMIZERS = {
    "adama": functools.partial(jaxmem.adama, 1e-2, accumulation_steps=2),
    "adamw": functools.partial(optax.adamw, 1e-2),
}
BY_HAND = {
    "adama": functools.partial(OPTIMIZERS["adama"], moments="int8"),
    "adamw": lambda: jaxmem.quantized(optax.adamw(1e-2)),
}


def build(plan, name="adama"):
    return tiny_lm.released(OPTIMIZERS[name](), plan=plan)


def by_hand(plan, name="adama"):
    return tiny_lm.released(BY_HAND[name](), plan=plan)


def plan_of(name, budget, **options):
    made = functools.partial(build, name=name)
    state = made(None).init(params())
    options = {"decide": BOTH, "lossy_states": True} | options
    return jaxmem.plan(made, state, batch(), budget=budget, **options)


@functools.cache
def tight(name="adama"):
    """A plan for 2 % more than the least bytes of a step with moments in 8 bits, all of whose
    states are on the device.
    """
    made = functools.partial(by_hand, name=name)
    args = jax.eval_shape(lambda: made(None).init(params())), batch()
    with pytest.raises(BudgetError, match="the least that is expected to compile") as error:
        jaxmem.plan(made, *args, budget=2**16, host_budget=2**10, decide=BOTH)
    return plan_of(name, int(1.02 * error.value.least_bytes), host_budget=2**10)


@pytest.mark.slow
def test_moments_are_in_8_bits_where_float_moments_do_not_fit(tmp_path):
    plan = tight()
    assert plan.moments == "int8"
    assert plan.compiled_bytes <= plan.budget_bytes
    assert plan.lossy == "the optimizer's moments are in 8 bits: no plan with float moments fits"
    assert "moments in 8 bits" in str(plan)
    with pytest.raises(BudgetError, match="the least that is expected to compile"):
        plan_of("adama", plan.budget_bytes, host_budget=2**10, lossy_states=False)
    again = plans.reloaded(plan, tmp_path)
    assert again == plan
    assert again.moments == "int8"
    figures = jaxmem.plans.difference(dataclasses.replace(plan, moments="float"), again).figures
    assert figures == {"moments": ("float", "int8")}
    # A loaded plan makes the same step, from a state of either form.
    verified = jaxmem.verify(again, build, build(plan).init(params()), batch())
    assert verified.compiled_bytes == plan.compiled_bytes
    for state in (build(None).init(params()), build(plan).init(params())):
        _, metrics = verified.step(verified.place(state), batch())
        assert np.isfinite(metrics["loss"])


@pytest.mark.quick("adama")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_trains_as_a_step_that_is_quantized_by_hand(name, optimized):
    """From a first state, whose moments are zeros in both forms, bit for bit."""
    plan = tight(name)
    assert plan.moments == "int8"
    state = plan.place(build(None, name).init(params()))
    step = tiny_lm.released(BY_HAND[name](), plan=dataclasses.replace(plan, moments="float"))
    other, own = step.init(params()), jax.jit(step, donate_argnums=0)
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for seed in range(4):
        state, found = plan.step(state, batch(seed))
        other, wanted = own(other, batch(seed))
        assert found["loss"] == wanted["loss"]
    jax.tree.map(np.testing.assert_array_equal, state, other)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), state[0], params())
    assert min(jax.tree.leaves(moved)) > 1e-3
    assert jax.tree.structure(build(plan, name).init(params())) == jax.tree.structure(state)


@pytest.mark.quick("adama")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_state_is_made_in_8_bits(name):
    plan = tight(name)
    layer, outer = apart(params())
    made = plan.create(jax.tree.map(jnp.copy, outer), layer)
    want = plan.place(build(None, name).init(params()))
    jax.tree.map(np.testing.assert_array_equal, made, want)
    assert jax.tree.structure(made) == jax.tree.structure(want)


def trained(name, steps=3):
    """A state with float moments that are not zero."""
    step = build(None, name)
    state, call = step.init(params()), jax.jit(step, donate_argnums=0)
    for seed in range(steps):
        state, _ = call(state, batch(seed))
    return step, state


MOMENTS = {"adama": lambda s: (s.mu, s.nu), "adamw": lambda s: (s[0].mu, s[0].nu)}


@pytest.mark.quick("adamw-where1")
@pytest.mark.parametrize("where", [{"persist": LAYERS}, {"persist": 1, "copies": 1}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_is_converted_within_the_bound_of_its_codes(name, where):
    step, state = trained(name)
    want = jax.tree.map(np.asarray, MOMENTS[name](state[1]))
    own = jax.tree.map(np.asarray, state[0])
    state = step.split(state, **where)
    found = step.quantized_state(state)
    inner = found[1].inner if name == "adamw" else found[1]
    made = MOMENTS[name](inner)
    jax.tree.map(np.testing.assert_array_equal, found[0], own)
    for coded, exact, floor in zip(made, want, (1.8e-5, 2.7e-10)):
        is_code = lambda a: hasattr(a, "codes")
        for code, a in zip(jax.tree.leaves(coded, is_leaf=is_code), jax.tree.leaves(exact)):
            assert np.abs(a).max() > 0
            largest = np.abs(a).max(-1, keepdims=True)
            bound = (np.abs(a) + floor * largest) / 8 * 1.0001
            near = jax.tree.map(np.asarray, code).decoded
            assert (np.abs(near - a) <= bound).all()
            assert np.mean(near != a) > 0.1, "it is not exact"
    # The values do not depend on where the state was stored, and the step takes the state.
    same = step.quantized_state(trained(name)[1])
    jax.tree.map(np.testing.assert_array_equal, found, same)
    new, metrics = jax.jit(step.quantized())(step.quantized().split(found, 1), batch())
    exact, expected = jax.jit(step)(trained(name)[1], batch())
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    close(step.quantized().joined(new)[0], exact[0], 0.05)


def test_the_originals_of_coded_moments_are_deleted():
    step, state = trained("adama", 1)
    found = step.quantized_state(state)
    assert all(a.is_deleted() for a in jax.tree.leaves((state[1].mu, state[1].nu)))
    assert not any(a.is_deleted() for a in jax.tree.leaves(found))


def test_where_everything_fits_moments_stay_float():
    plan = plan_of("adama", "1GiB")
    assert (plan.moments, plan.lossy) == ("float", "")
    assert plan.places == Places(LAYERS, LAYERS)
    assert plan.to_json().get("moments", "float") == "float"
    exact = plan_of("adama", "1GiB", lossy_states=False)
    assert plan.actions == exact.actions


@pytest.mark.skipif(not STREAMS, reason="XLA copies host stacks")
def test_a_plan_on_a_cpu_never_trades_exactness_for_time():
    """XLA estimates no seconds of a CPU, so that the seconds of coding are unknown."""
    state = jax.tree.leaves(jax.eval_shape(lambda: build(None).init(params())))
    budget = int(0.6 * sum(a.size * a.dtype.itemsize for a in state)) + 2**19
    plan = plan_of("adama", budget)
    assert plan.moments == "float"
    assert host_bytes(plan.place(build(None).init(params()))) > 0


@pytest.mark.slow
def test_a_step_within_another_is_converted_too():
    budget = tight().budget_bytes
    options = {"decide": BOTH, "lossy_states": True, "host_budget": 2**10}
    plan = jaxmem.plan(counted, first_counted(), batch(), budget=budget, **options)
    assert plan.moments == "int8"
    state, _ = plan.step(plan.place(first_counted()), batch())
    want, _ = tight().step(tight().place(build(None).init(params())), batch())
    jax.tree.map(np.testing.assert_array_equal, state["pair"], want)
    assert int(state["count"]) == 1


@pytest.mark.parametrize("seconds", [(1.0, 0.99), (1.0, 0.9)])
def test_more_microbatches_are_no_reason_for_8_bits(seconds):
    """Of one microbatch with float moments, and two with moments in 8 bits."""
    made = {
        1: plans.plan(predicted_seconds=seconds[0], uncertain_seconds=0.0, places=PLACES),
        2: plans.plan(
            predicted_seconds=seconds[1], uncertain_seconds=0.0, places=PLACES, moments="int8"
        ),
    }
    found = fastest_plan([1, 2], made.__getitem__)
    assert found.moments == ("int8" if seconds[1] < 0.98 else "float")


PLACES = Places(24, 6, 6, 6)


def test_what_cannot_be_in_8_bits_is_refused():
    state = build(None).init(params())
    ask = functools.partial(jaxmem.plan, build, state, batch(), lossy_states=True)
    with pytest.raises(StepError, match="`lossy_states` is True, and `decide` has 'actions'"):
        ask()
    with pytest.raises(StepError, match="`lossy_states` is True, and `batch` is 'max'"):
        jaxmem.plan(
            build, state, lambda n: batch(), decide=BOTH, lossy_states=True, batch="max", sizes=[8]
        )
    with pytest.raises(StepError, match="`lossy_states` is 1"):
        jaxmem.plan(build, state, batch(), decide=BOTH, lossy_states=1)
    for tx, message in (
        (optax.sgd(0.1), "no floating-point array that 8 bits can store"),
        (BY_HAND["adama"](), "is stored in 8 bits already"),
        (BY_HAND["adamw"](), "is stored in 8 bits already"),
        (jaxmem.adama(1e-2, mu_dtype="bfloat16"), "`mu_dtype` is .*bfloat16.* and `moments`"),
    ):
        step = tiny_lm.released(tx)
        with pytest.raises(OptimizerError, match=message):
            step.quantized_state(step.init(params()))
    other = lambda plan: tiny_lm.released(optax.sgd(0.1), plan=plan)
    with pytest.raises(OptimizerError, match="no floating-point array that 8 bits can store"):
        jaxmem.plan(other, other(None).init(params()), batch(), decide=BOTH, lossy_states=True)
    with pytest.raises(TagError, match="Assignment: `moments` is 'int4'; expected one of 'float'"):
        Assignment(moments="int4")


def test_a_file_with_moments_in_8_bits_needs_places(tmp_path):
    path = tmp_path / "plan.json"
    plans.plan(moments="int8").save(path)
    with pytest.raises(PlanFileError, match="`moments`: got 'int8'"):
        jaxmem.Plan.load(path)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 1), reason="offload to a GPU's host is refused")
def test_copies_to_a_gpu_that_take_longer_than_work_are_made_smaller():
    """Of 12 layers of 4 M parameters and 512 tokens: 600 MB of states with float moments."""
    make = lambda: tiny_lm.parameters(np.float32, layers=12, width=1024, vocab=512)
    state = jax.eval_shape(lambda: build(None).init(make()))
    args, options = (state, jax.ShapeDtypeStruct((8, 65), jnp.int32)), {"target": "h200"}
    plan_for = functools.partial(jaxmem.plan, build, *args, decide=BOTH, **options)
    exact, lossy = (plan_for(budget="250MB", lossy_states=lossy) for lossy in (False, True))
    assert exact.time_source == lossy.time_source == "xla"
    assert (exact.moments, lossy.moments) == ("float", "int8")
    assert exact.compiled_bytes <= 250e6
    assert lossy.compiled_bytes <= 250e6
    assert exact.timeline().exposed_share > 0.3
    gained = exact.predicted_seconds - lossy.predicted_seconds
    assert gained > 0.02 * exact.predicted_seconds
    assert lossy.lossy.endswith(f"is predicted to take {1e3 * gained:.2f} ms more a step")
    # Moments take 2 bytes a parameter and 8 bytes a row where they took 8, and parameters 4.
    streamed = lossy.places.streamed
    moments = 2 * 4 * 1024 * 1024 + 8 * (1024 + 2048)
    assert lossy.host_bytes >= streamed * (4 * 4 * 1024 * 1024 + moments) > 0
    assert exact.host_bytes > lossy.host_bytes
    # Where all states fit, they stay exact.
    roomy = plan_for(budget="8GB", lossy_states=True)
    assert roomy.moments == "float"
    assert roomy.host_bytes == 0
