"""`jaxmem.jit` of released steps: actions and places of states are planned at the first call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import StepError
from tests.planner.test_jit import no_search
from tests.released.test_loss import adam, model, plain_step, trained
from tests.shared.compare import close
from tests.shared.programs import nbytes
from tests.shared.refused import refused

pytestmark = [
    pytest.mark.core,
    pytest.mark.standard_promotion,
    pytest.mark.usefixtures("own_cache"),
]
BOTH = {"decide": ("actions", "states"), "actions": jaxmem.plans.LOSSLESS}
BUDGET = "1300KiB"  # the parameters and moments take 1.0 MiB, and the plain step 2.6 MiB


@functools.cache
def gemma():
    """A loss, its parameters and batch, and the state after three plain steps."""
    loss, params, args = model("gemma, a scan")
    want, metrics = trained(plain_step(adam(), loss), (params, adam().init(params)), args, 3)
    return loss, params, args, jax.device_get(want), float(metrics["loss"])


def planned(budget=BUDGET, **options):
    return jaxmem.jit(jaxmem.released_step(adam(), gemma()[0]), budget, **options)


def memories(tree) -> set[str]:
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


@functools.cache
def streamed():
    """The step with places of states, after three calls; the first state, and the last one."""
    _, params, args, *_ = gemma()
    step = planned(**BOTH)
    first = state = step.init(jax.tree.map(jnp.copy, params), *args)
    for _ in range(3):
        state, metrics = step(state, *args)
    return step, first, state, metrics


def test_states_that_do_not_fit_are_moved_at_the_first_call():
    step, first, state, metrics = streamed()
    *_, want, loss = gemma()
    assert step.plan.compiled_bytes <= step.plan.budget_bytes
    assert step.plan.places.persist < step.plan.places.layers
    assert memories(state) == {"device", "pinned_host"}
    assert any(a.is_deleted() for a in jax.tree.leaves(first))
    close(jax.device_get(step.joined(state)), want, 1e-11)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-11)


def test_a_state_from_a_checkpoint_is_moved_again():
    step, _, state, _ = streamed()
    _, params, args, want, _ = gemma()
    again = step.init(jax.tree.map(jnp.copy, params), *args)
    for _ in range(3):
        again, _ = step(again, *args)
    assert memories(again) == memories(state)
    close(jax.device_get(step.joined(again)), want, 1e-11)


def test_a_state_of_arrays_in_the_hosts_memory_is_made_in_its_places():
    """The first state is made under the plan: no array of it is whole on the device before."""
    _, params, args, want, loss = gemma()
    step = planned(**BOTH)
    state = step.init(jax.tree.map(np.asarray, params), *args)
    assert memories(state) == {"device", "pinned_host"}
    run = step._last[0].run
    for _ in range(3):
        state, metrics = step(state, *args)
    assert step._last[0].run is run, "the call compiles nothing again"
    close(jax.device_get(step.joined(state)), want, 1e-11)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-11)


def test_a_later_process_searches_nothing(monkeypatch):
    _, params, args, want, _ = gemma()
    before, *_ = streamed()
    no_search(monkeypatch)
    step = planned(**BOTH)
    state = step.init(jax.tree.map(jnp.copy, params), *args)
    for _ in range(3):
        state, _ = step(state, *args)
    assert step.plan.places == before.plan.places
    close(jax.device_get(step.joined(state)), want, 1e-11)


def test_moments_are_stored_in_8_bits_if_nothing_else_fits():
    """The host's budget is less than the streamed states with float moments."""
    loss, params, args, *_ = gemma()
    step = planned(host_budget="500KiB", lossy_states=True, **BOTH)
    state = step.init(jax.tree.map(jnp.copy, params), *args)
    for _ in range(3):
        state, metrics = step(state, *args)
    assert step.plan.moments == "int8"
    hand = jaxmem.released_step(jaxmem.quantized(adam()), loss)
    want, expected = trained(hand, hand.init(params, *args), args, 3)
    joined = step.joined(state)
    assert jax.tree.structure(joined) == jax.tree.structure(want)
    close(jax.device_get(joined), jax.device_get(want), 1e-11)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-11)


def test_actions_alone_leave_states_in_place():
    _, params, args, want, _ = gemma()
    step = planned("1900KiB", actions=jaxmem.plans.LOSSLESS)
    state = step.init(jax.tree.map(jnp.copy, params), *args)
    for _ in range(3):
        state, _ = step(state, *args)
    assert step.plan.places is None
    assert not step.plan.keeps_everything
    assert memories(state) == {"device"}
    close(jax.device_get(state), want, 1e-11)


def test_a_key_is_an_argument_of_the_step():
    loss, params, (batch, key) = model("keys and rates")
    step = jaxmem.jit(jaxmem.released_step(adam(), loss))
    state = step.init(jax.tree.map(jnp.copy, params), batch, key)
    got, _ = step(state, batch, key=key)
    want, _ = trained(plain_step(adam(), loss), (params, adam().init(params)), (batch, key), 1)
    close(jax.device_get(got), jax.device_get(want))


@refused(
    StepError,
    (lambda: planned(donate_argnums=0), "released step.*`donate_argnums`"),
    (lambda: jaxmem.jit(gemma()[0], **BOTH), r"option `decide`; .*jaxmem\.released_step"),
    (lambda: planned().joined(None), "no plan before its first call"),
)
def test_wrong_arguments(wrong):
    wrong()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:jaxmem. no block's backward reads the tags 'mlpwo'")
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("MaxText's decoder", 0.8),
        ("NNX, a scan", 0.7),
        ("Linen, nn.scan", 0.7),
        ("gemma, a loop", 0.5),
        ("Linen, a loop", 0.55),
        ("Equinox, a loop", 0.5),
        ("NNX, a list", 0.5),
        ("GPT-2", 0.5),
        ("Whisper", 0.5),
    ],
)
def test_other_models_train_within_less_memory_than_the_plain_step(name, share):
    loss, params, args = model(name)
    state = params, adam().init(params)
    plain = jax.jit(plain_step(adam(), loss), donate_argnums=0).lower(state, *args).compile()
    budget = int(share * nbytes(plain))
    step = jaxmem.jit(jaxmem.released_step(adam(), loss), budget, **BOTH)
    got = step.init(jax.tree.map(jnp.copy, params), *args)
    for _ in range(3):
        got, _ = step(got, *args)
    want, _ = trained(plain_step(adam(), loss), state, args, 3)
    assert step.plan.compiled_bytes <= budget
    assert step.plan.places.persist < step.plan.places.layers
    rtol = 1e-6 if name in ("GPT-2", "Whisper") else 1e-11  # Transformers' compute in float32
    close(jax.device_get(step.joined(got)), jax.device_get(want), rtol)
