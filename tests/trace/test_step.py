"""What `build` must be: called with a plan, it returns a step that can be traced."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmem._trace.step import trace
from jaxmem.errors import StepError
from tests.shared.refused import refused

X = (jax.ShapeDtypeStruct((4,), jnp.float32),)


def step(x):
    return x - x.mean()


def raises(plan):
    raise TypeError("of its own")


@refused(
    StepError,
    (lambda: step, r"`build` is <lambda>\(\), .* called as <lambda>\(plan\): too many"),
    (lambda plan, data: step, r"missing a required .*'data'; expected a function of a plan"),
    (lambda *, plan: step, "too many positional arguments"),
    (functools.partial(lambda plan: step, microbatches=2), "an unexpected .*'microbatches'"),
)
def test_a_build_of_the_wrong_arity_is_told_what_is_expected(build):
    trace(build, None, X)


@pytest.mark.parametrize(
    "build",
    [
        lambda plan: step,
        lambda plan=None, more=3: step,
        lambda *anything: step,
        functools.partial(lambda config, plan, microbatches: step, "config", microbatches=2),
    ],
)
def test_a_build_that_takes_a_plan_is_called_with_one(build):
    stage, traced = trace(build, None, X)
    assert stage is traced
    assert [a.shape for a in traced.jaxpr.in_avals] == [(4,)]


def test_what_a_build_raises_is_its_own():
    with pytest.raises(TypeError, match="^of its own$"):
        trace(raises, None, X)


def test_what_a_step_raises_is_named_and_kept_as_the_cause():
    def failing(x):
        raise KeyError("gain")

    with pytest.raises(StepError, match=r"cannot be traced .*\(\(4,\)\): KeyError: 'gain'") as got:
        trace(lambda plan: failing, None, X)
    assert isinstance(got.value.__cause__, KeyError)


def test_a_step_that_ends_the_program_ends_it():
    def ending(x):
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        trace(lambda plan: ending, None, X)
