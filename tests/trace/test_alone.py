"""Optimizers' updates followed through their traces: what belongs to which array, and what couples
arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem._trace.alone import Alone

pytestmark = pytest.mark.jax_defaults


def parameters():
    return {"a": jnp.arange(6.0).reshape(2, 3), "b": {"c": jnp.ones(3), "d": jnp.ones((3, 2))}}


def alone(tx):
    def update(gradient, params, state):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return Alone.of(tx.init, update, jax.eval_shape(parameters))


def test_what_a_state_holds_belongs_to_a_parameter_or_to_none():
    found = alone(optax.adamw(optax.linear_schedule(1.0, 0.1, 9)))
    assert found.names == ("params['a']", "params['b']['c']", "params['b']['d']")
    # Adam's count, its two moments, and the schedule's count.
    assert found.owners == (None, 0, 1, 2, 0, 1, 2, None)
    assert not any(found.follows)
    assert (found.coupled, found.mixed, found.draws) == (None, None, False)
    average = alone(optax.contrib.schedule_free_sgd(0.1))
    follows = [owner for owner, is_copy in zip(average.owners, average.follows) if is_copy]
    assert follows == [0, 1, 2], "it begins with the parameters"


def held(tx):
    """A transformation whose state is what it was given first, and never changes."""
    update = lambda g, s, p: (jax.tree.map(lambda g, a, b: g + a - b, g, s, p), s)
    return optax.chain(optax.GradientTransformation(lambda params: params, update), tx)


def test_what_never_changes_belongs_to_what_it_was_made_of():
    assert alone(held(optax.identity())).owners == (0, 1, 2)


@pytest.mark.parametrize(
    ("tx", "coupled", "mixed"),
    [
        (optax.lion(0.1), None, None),
        (optax.sgd(0.1, momentum=0.9, nesterov=True), None, None),
        (optax.rmsprop(0.1, centered=True, momentum=0.9), None, None),
        (optax.chain(optax.clip(1.0), optax.adagrad(0.1)), None, None),
        (optax.lamb(0.1), None, 0),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), None, 0),
        (optax.clip_by_global_norm(1.0), (0, 1), 0),
        (optax.apply_if_finite(optax.sgd(0.1), 2), (0, 1), 0),
        (optax.multi_transform({1: optax.normalize_by_update_norm(), 2: optax.sgd(0.1)},
                               {"a": 1, "b": {"c": 2, "d": 1}}), (0, 2), 0),
        (optax.stateless(lambda g, p: jax.tree.map(lambda a: a[::-1], g)), None, 0),
        (optax.stateless(lambda g, p: g | {"a": g["b"]["d"].T}), (0, 2), 2),
    ],
)  # fmt: skip
def test_arrays_that_depend_on_each_other_are_told(tx, coupled, mixed):
    found = alone(tx)
    assert (found.coupled, found.mixed) == (coupled, mixed)


def test_random_numbers_are_seen_inside_of_loops():
    def noise(g, p):
        body = lambda i, x: x + jax.random.normal(jax.random.key(i), x.shape)
        return g | {"a": jax.lax.fori_loop(0, 3, body, g["a"])}

    assert alone(optax.stateless(noise)).draws
    assert alone(optax.add_noise(0.1, 0.5, key=0)).draws


def test_a_part_of_the_parameters_is_updated_as_all_of_them_are():
    tx = optax.adamw(optax.linear_schedule(1.0, 0.1, 9), mask={"a": True, "b": False})
    params, gradient = parameters(), jax.tree.map(lambda a: jnp.cos(a) + 2, parameters())
    found, state, leaves = alone(tx), tx.init(params), jax.tree.leaves(params)
    gradients = jax.tree.leaves(gradient)
    for _ in range(3):
        states = jax.tree.leaves(state)
        updates, state = jax.jit(tx.update)(gradient, state, params)
        want, after = jax.tree.leaves(optax.apply_updates(params, updates)), jax.tree.leaves(state)
        shared = {s: states[s] for s, owner in enumerate(found.owners) if owner is None}
        for chosen in ([0], [1, 2], [2], []):
            owned = [s for s, owner in enumerate(found.owners) if owner in chosen]
            of = lambda arrays, numbers: {n: arrays[n] for n in numbers}
            new, kept = found.updated(
                of(gradients, chosen), of(leaves, chosen), of(states, owned), shared
            )
            close(new, of(want, chosen))
            close(kept, of(after, owned))
        _, counters = found.updated({}, {}, shared, {})
        close(counters, {s: after[s] for s in shared})


def close(got, want):
    assert got.keys() == want.keys()
    for k, a in want.items():
        np.testing.assert_allclose(got[k], a, rtol=1e-6, atol=1e-6)
