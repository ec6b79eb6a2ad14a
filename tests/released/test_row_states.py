"""The row ratio in a released step whose states are placed: its values wherever states lie, and the
place of the rows themselves, which no placement moves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import OptimizerError
from tests.shared import tiny_lm
from tests.shared.streamed import close, moved, parameters, places, tokens, train

pytestmark = [
    pytest.mark.core,
    pytest.mark.jax_defaults,
]


OF_EACH_KIND = {"persist": 1, "copies": 1, "buffers": 1, "outer_moments": "pinned_host"}


def row(n, **options):
    # A larger eps, so that rounding is not magnified where a gradient is nearly zero.
    given = {"eps": 1e-3, "weight_decay": 0.1, "accumulation_steps": n, "second_moment": "row"}
    return jaxmem.adamaw_a(0.03, **given | options)


@functools.cache
def resident(n, steps, clip=None):
    step = tiny_lm.released(row(n), clip=clip)
    return train(step, step.init(parameters()), steps)[0]


@pytest.mark.quick("4-where1-3-clip1")
@pytest.mark.parametrize(
    ("n", "where", "steps", "clip"),
    [
        (4, {"persist": 0}, 3, None),
        (4, {"persist": 1}, 3, ("component", 0.1)),
        (4, OF_EACH_KIND, 3, None),
        (4, OF_EACH_KIND, 20, None),
        (2, {"persist": 3}, 20, None),
        (1, {"persist": 1}, 3, None),
    ],
)
def test_values_are_those_of_a_resident_state(n, where, steps, clip):
    step = tiny_lm.released(row(n), clip=clip)
    found, _ = train(step, step.split(step.init(parameters()), **where), steps)
    (params, state), _ = found
    assert moved(params) > 1e-3
    assert min(float(np.max(a)) for a in jax.tree.leaves(state.square)) > 0
    close(found, resident(n, steps, clip))


def test_the_ratio_is_felt():
    """Else all of the above would hold without it."""
    (params, _), _ = resident(4, 3)
    step = tiny_lm.released(row(4, second_moment="squares"))
    (plain, _), _ = train(step, step.init(parameters()), 3)[0]
    largest = lambda tree: max(float(np.abs(a).max()) for a in jax.tree.leaves(tree))
    assert largest(jax.tree.map(np.subtract, params, plain)) > 1e-3


def test_rows_are_one_array_for_all_layers_on_the_device_before_and_after():
    step = tiny_lm.released(row(2))
    state = step.split(step.init(parameters()), **OF_EACH_KIND)
    for _ in range(2):
        for rows in (state[1].square, state[1].sketch):
            assert jax.tree.map(jnp.shape, rows["blocks"]) == {"down": (4, 64), "up": (4, 32)}
            assert {a.sharding.memory_kind for a in jax.tree.leaves(rows)} == {"device"}
        state, _ = jax.jit(step, donate_argnums=0)(state, tokens(0))
    assert places(state) == [{"device"}, {"device", "pinned_host"}, {"pinned_host"}]
    assert jax.tree.structure(step.joined(state)) == jax.tree.structure(step.init(parameters()))


def test_a_state_of_the_other_second_moment_is_refused():
    step, plain = tiny_lm.released(row(2)), tiny_lm.released(jaxmem.adama(0.01))
    with pytest.raises(OptimizerError, match="the state has no rows"):
        step(plain.init(parameters()), tokens(0))
    with pytest.raises(OptimizerError, match="the state has rows"):
        plain.split(step.init(parameters()), 1)
    params, state = step.init(parameters())
    other = state._replace(square=jax.tree.map(lambda a: a[..., None], state.square))
    with pytest.raises(OptimizerError, match=r"`state\[1\].square\['blocks'\].* has shape"):
        step((params, other), tokens(0))
