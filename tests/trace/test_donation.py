"""What a step holds twice for want of donation: its bytes are those that the compile shows, and the
user is told.
"""

import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._trace.donation import held_twice
from jaxmem.errors import JaxmemWarning
from tests.shared import models, tiny_lm

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]


def state_and_step():
    step = tiny_lm.released(jaxmem.adama(1e-3, accumulation_steps=2))
    params = tiny_lm.parameters(jnp.float32, width=64, vocab=64)
    return step, step.init(params), tiny_lm.tokens(4)


def test_its_bytes_are_those_that_the_compile_shows():
    step, state, batch = state_and_step()
    total = lambda compiled: (
        (m := compiled.memory_analysis()).output_size_in_bytes - m.alias_size_in_bytes
    )
    kept, donated = jax.jit(step), jax.jit(step, donate_argnums=0)
    found = held_twice(kept.trace(state, batch))
    assert found.keys() == {"0"}
    assert held_twice(donated.trace(state, batch)) == {}
    difference = total(kept.lower(state, batch).compile()) - total(
        donated.lower(state, batch).compile()
    )
    assert found["0"] == pytest.approx(difference, rel=0.01)
    assert found["0"] >= 3 * sum(a.nbytes for a in jax.tree.leaves(state[0]))


def test_moments_alone_are_told_apart():
    apart = lambda params, moments, batch: state_and_step()[0]((params, moments), batch)
    _, (params, moments), batch = state_and_step()
    traced = jax.jit(apart, donate_argnums=0).trace(params, moments, batch)
    assert held_twice(traced) == {"1": sum(a.nbytes for a in jax.tree.leaves(moments))}


def test_plan_warns_of_a_step_that_is_jitted_without_donation():
    _, state, batch = state_and_step()

    def build(plan, **donated):
        return jax.jit(
            tiny_lm.released(jaxmem.adama(1e-3, accumulation_steps=2), plan=plan), **donated
        )

    ask = lambda build: jaxmem.plan(build, state, batch)
    with pytest.warns(
        JaxmemWarning, match=r"plan: the step replaces .* of its argument 0 .*donate_argnums=0"
    ):
        ask(build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(lambda plan: build(plan, donate_argnums=0))


def test_what_is_no_result_is_not_held_twice():
    loss = models.scanned(None)
    traced = jax.jit(lambda p, x: loss(p, x)).trace(models.parameters(), models.batch())
    assert held_twice(traced) == {}
