"""Whole steps are run as often as wanted, and nothing of the user's is changed by it. Pieces of a
step are timed on arguments of their own kind.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem._target.compile import running
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.running import CannotRun, StepRun, in_turns, obstacle
from jaxmem._target.compile.timing import sample
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace

SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def step(state, x, key):
    noise = jax.random.normal(key, x.shape)
    return {"w": state["w"] - 0.1 * x.T @ (x @ state["w"] + noise)}, state["n"] + 1


def arrays():
    return {"w": jnp.ones((8, 8)), "n": jnp.int32(3)}, jnp.ones((4, 8)), jax.random.key(1)


def executable(step, *args):
    stage, _ = trace(lambda plan: step, None, args)
    return stage.lower().compile()


def test_the_users_arrays_are_used_and_left_as_they_are():
    args = arrays()
    run = StepRun(executable(step, *args), args)
    assert run.given
    assert all(run() > 0 for _ in range(3)), "the state is donated, and there every time"
    jax.tree.map(np.testing.assert_array_equal, args[:2], arrays()[:2])


def test_arguments_are_made_where_shapes_were_given():
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays())
    run = StepRun(executable(step, *shapes), shapes)
    assert not run.given
    assert run() > 0


def test_a_module_of_nnx_is_not_changed_by_runs():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = jnp.copy(model.kernel[...])

    @nnx.jit
    def step(model, x):
        nnx.update(model, jax.tree.map(lambda p: p * 2, nnx.state(model)))
        return x @ model.kernel[...]

    args = (model, jnp.ones((4, 8)))
    run = StepRun(executable(step, *args), args)
    assert run() > 0
    assert run() > 0
    np.testing.assert_array_equal(model.kernel[...], before)


def test_steps_take_turns_until_the_time_is_over(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(running.time, "perf_counter", lambda: float(next(clock)))
    seen = []

    counted = lambda name: lambda: seen.append(name) or 1.0
    found = in_turns([*map(counted, "abc")], seconds=4.5)
    rounds = [tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1, "in an order of its own each time"
    assert [len(f) for f in found] == [len(rounds)] * 3 == [6] * 3


def test_a_slow_step_is_run_twice_at_least():
    assert [len(f) for f in in_turns([lambda: 1.0], seconds=0.0)] == [running.LEAST_ROUNDS]


def traced(function, *args):
    return jax.jit(function).trace(*args)


def until_small(x):
    return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x * 0.5, x)


def prints(x):
    jax.debug.print("{}", x.sum())
    return x


def test_steps_that_may_do_harm_or_not_end_are_not_run():
    assert obstacle(traced(jnp.tanh, SHAPE), given=False) is None
    assert obstacle(traced(until_small, SHAPE), given=True) is None
    assert "may not end" in str(obstacle(traced(until_small, SHAPE), given=False))
    assert "has effects" in str(obstacle(traced(prints, SHAPE), given=True))


def test_a_backend_runs_what_fits_and_says_nothing_of_the_rest(measured_times, monkeypatch):
    backend = Local(Target.parse("local"))
    args = (SHAPE,)
    stage, told = trace(lambda plan: jnp.tanh, None, args)
    built = backend.compile_fully(stage, told).result()
    quick, nothing = backend.run(
        [built, dataclasses.replace(built, executable=None)], told, args, 0.01
    )
    assert len(quick) >= running.LEAST_ROUNDS
    assert nothing == []
    monkeypatch.setattr("jaxmem._target.compile.running.free_bytes", lambda target: 100)
    assert backend.run([built], told, args, 0.01) == [[]]


def test_a_step_that_fails_as_it_runs_is_not_timed(measured_times):
    def fails(x):
        return jax.pure_callback(lambda x: 1 / 0, SHAPE, x)

    backend = Local(Target.parse("local"))
    stage, told = trace(lambda plan: fails, None, (SHAPE,))
    built = backend.compile_fully(stage, told).result()
    with pytest.raises(CannotRun, match=r"(?s)running it raised .*division by zero"):
        backend.run([built], told, (SHAPE,), 0.01)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_random_key_is_of_the_generator_that_the_step_was_given(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), (2, 3))
    found = sample(jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    assert (found.shape, found.dtype) == (keys.shape, keys.dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_numbers_are_ordinary(dtype):
    found = np.asarray(sample(jax.ShapeDtypeStruct((64, 64), dtype)), np.float32)
    assert np.isfinite(found).all()
    assert 0.8 < found.std() < 1.2
