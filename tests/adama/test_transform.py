"""AdamA as an optax transformation: Adam itself with one microbatch, Algorithm 1 with more, inside
optax's wrappers.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._optim.adama.transform import AdamAState
from jaxmem.errors import OptimizerError
from tests.shared import adama_oracle
from tests.shared.compare import pairs
from tests.shared.refused import refused


def parameters(dtype=np.float64):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    return {"w": make(3, 4), "b": make(4)}


def gradients(count, dtype=np.float64, seed=1):
    rng = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), dtype), parameters())
        for _ in range(count)
    ]


def steps(tx, params, grads):
    """Parameters and state after each gradient."""
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


def run(tx, params, grads):
    return list(steps(tx, params, grads))[-1]


def schedule(count):
    return 0.1 / (1.0 + count)


ADAM = jaxmem.adama, optax.adam
MATRICES = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
DECAYING = {"learning_rate": schedule, "weight_decay": 0.3, "mask": MATRICES}
CASES = {
    "adam": (*ADAM, {"learning_rate": 0.1}),
    "scale": (jaxmem.scale_by_adama, optax.scale_by_adam, {}),
    "schedule": (*ADAM, {"learning_rate": schedule, "b1": 0.8}),
    "eps_root": (*ADAM, {"learning_rate": 0.1, "eps_root": 1e-3}),
    "nesterov": (*ADAM, {"learning_rate": 0.1, "nesterov": True}),
    "mu_dtype": (*ADAM, {"learning_rate": 0.1, "mu_dtype": "bfloat16"}),
    "adamw": (jaxmem.adamaw_a, optax.adamw, DECAYING),
}


@pytest.mark.parametrize("name", CASES)
def test_with_one_microbatch_it_is_optaxs_adam(name, optimized):
    ours, theirs, arguments = CASES[name]
    params, grads = parameters(np.float32), gradients(12, np.float32)
    got, want = (list(steps(make(**arguments), params, grads)) for make in (ours, theirs))
    # an update differs by 1 ulp, of which each of twelve steps may leave some in a parameter
    for at, ulps in ((0, 1), (-1, 4)):
        for a, b in pairs(got[at][0], want[at][0]):
            np.testing.assert_array_max_ulp(a, b, ulps)
    state = got[-1][1]
    assert int(state.count) == 12
    assert state.mu["w"].dtype == arguments.get("mu_dtype", np.float32)


def agrees_over_50_minibatches(tx, oracle, n, params, grads, decays):
    """Asserts that a transformation with `schedule` has the oracle's parameters. Returns the last
    state.
    """
    minibatches = [
        [lambda _, g=g: jax.tree.leaves(g) for g in grads[i * n : (i + 1) * n]] for i in range(50)
    ]
    decay = {"decay": 0.05, "decayed": jax.tree.leaves(decays)}
    want = oracle.adama(jax.tree.leaves(params), minibatches, schedule, 0.8, 0.97, **decay)
    made = tx(schedule, 0.8, 0.97, weight_decay=0.05, mask=decays, accumulation_steps=n)
    got, state = run(made, params, grads)
    for a, b in zip(jax.tree.leaves(got), want[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert (int(state.count), int(state.folded)) == (50, 0)
    return state


@pytest.mark.parametrize("n", [1, 2, 5])
def test_it_agrees_with_algorithm_1_over_50_minibatches(n):
    decays = {"w": True, "b": False}
    given = jaxmem.adamaw_a, adama_oracle, n, parameters(), gradients(50 * n)
    agrees_over_50_minibatches(*given, decays)


def test_an_update_comes_with_the_last_microbatch_alone():
    tx, params = jaxmem.adama(0.1, accumulation_steps=3), parameters()
    state, update = tx.init(params), jax.jit(tx.update)
    for i, g in enumerate(gradients(6)):
        updates, state = update(g, state, params)
        moved = [bool(u.any()) for u in jax.tree.leaves(updates)]
        assert moved == [i % 3 == 2] * 2
        assert (int(state.count), int(state.folded)) == ((i + 1) // 3, (i + 1) % 3)


def test_injected_hyperparameters_can_be_changed_between_steps():
    params, grads = parameters(), gradients(4)
    injected = optax.inject_hyperparams(jaxmem.adama)
    tx = injected(learning_rate=0.1, accumulation_steps=2)
    state, update = tx.init(params), jax.jit(tx.update)
    for i, g in enumerate(grads):
        state.hyperparams["learning_rate"] = jnp.asarray(0.1 if i < 2 else 0.01)
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    rate = lambda count: jnp.where(count < 1, 0.1, 0.01)
    want, _ = run(jaxmem.adama(rate, accumulation_steps=2), parameters(), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), params, want)


def test_multi_transform_gives_it_a_part_of_the_tree():
    params, grads = parameters(), gradients(4)
    tx = optax.multi_transform(
        {"a": jaxmem.adama(0.1, accumulation_steps=2), "none": optax.set_to_zero()},
        {"w": "a", "b": "none"},
    )
    got, _ = run(tx, params, grads)
    alone, _ = run(
        jaxmem.adama(0.1, accumulation_steps=2), {"w": params["w"]}, [{"w": g["w"]} for g in grads]
    )
    np.testing.assert_allclose(got["w"], alone["w"], rtol=1e-14)
    np.testing.assert_array_equal(got["b"], params["b"])


def test_the_state_is_stored_by_orbax(tmp_path):
    import orbax.checkpoint as ocp

    tx, params, grads = jaxmem.adama(0.1, accumulation_steps=2), parameters(), gradients(5)
    half, state = run(tx, params, grads[:3])  # in the middle of a minibatch
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", (half, state))
        checkpointer.wait_until_finished()
        half, state = checkpointer.restore(
            tmp_path / "step", jax.eval_shape(lambda: (params, tx.init(params)))
        )
    assert isinstance(state, AdamAState)
    for g in grads[3:]:
        updates, state = tx.update(g, state, half)
        half = optax.apply_updates(half, updates)
    want, _ = run(tx, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-14), half, want)


@refused(
    OptimizerError,
    ({"accumulation_steps": 0}, "`accumulation_steps` is 0; expected a whole number"),
    ({"accumulation_steps": 2.5}, "`accumulation_steps` is 2.5"),
    ({"accumulation_steps": True}, "`accumulation_steps` is True"),
    ({"b1": 1.0}, "`b1` is 1.0; expected a finite number, at least 0 and below 1;"),
    ({"b2": -0.1}, "`b2` is -0.1"),
    ({"b2": None}, "`b2` is None"),
    ({"eps": -1}, "`eps` is -1; expected a finite number, at least 0"),
    ({"eps_root": math.nan}, "`eps_root` is nan"),
    ({"nesterov": True, "accumulation_steps": 2}, "needs the minibatch's whole gradient"),
)
@pytest.mark.parametrize(
    "make",
    [
        jaxmem.scale_by_adama,
        functools.partial(jaxmem.adama, 0.1),
        functools.partial(jaxmem.adamaw_a, 0.1),
    ],
)
def test_bad_settings_are_refused(arguments, make):
    make(**arguments)


@refused(
    OptimizerError,
    *((rate, f"`learning_rate` is {rate!r}") for rate in (None, "x", math.nan, math.inf, True)),
)
@pytest.mark.parametrize("make", [jaxmem.adama, jaxmem.adamaw_a])
def test_wrong_learning_rates_are_refused(rate, make):
    make(rate)


@pytest.mark.parametrize(
    ("rate", "sign"),
    [
        (0.1, -1),
        (-0.1, 1),  # ascent
        (np.float32(0.1), -1),
        (jnp.float32(0.1), -1),
        (optax.constant_schedule(0.1), -1),
    ],
)
def test_learning_rates_are_numbers_arrays_or_schedules(rate, sign):
    params = {"w": jnp.ones(2)}
    for tx in (jaxmem.adama(rate), optax.inject_hyperparams(jaxmem.adama)(rate)):
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert updates["w"] == pytest.approx([sign * 0.1] * 2, rel=1e-6)


def test_other_gradients_than_the_states_are_refused():
    tx, params = jaxmem.adamaw_a(0.1, accumulation_steps=2), parameters()
    state = tx.init(params)
    with pytest.raises(OptimizerError, match=r"`updates\['w'\]` has .* \(4, 4\), .* \(3, 4\)"):
        tx.update({"w": jnp.zeros((4, 4)), "b": params["b"]}, state, params)
    with pytest.raises(OptimizerError, match="expected the gradient of the parameters"):
        tx.update({"w": params["w"]}, state, params)
    with pytest.raises(OptimizerError, match="`params` is None"):
        tx.update(params, state)
    with pytest.raises(OptimizerError, match="finish: `nesterov`"):
        jaxmem.adama(0.1, nesterov=True).finish(state, params)
