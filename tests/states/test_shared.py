"""Arrays that stand in a state more than once: each of their places gets what it asks for, and
nothing is deleted that another place still has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem
from tests.shared import tiny_lm

pytestmark = [
    pytest.mark.core,
    pytest.mark.jax_defaults,
]
LAYERS = 3
PLACES = (
    {"persist": 0},
    {"persist": 1},
    {"persist": 0, "copies": 2, "outer_moments": "pinned_host"},
)


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, (got, want)))


def one_array(params):
    """A state of AdamA whose two moments are the same arrays."""
    step = tiny_lm.released(jaxmem.adama(0.01))
    params, state = step.init(params)
    return step, (params, state._replace(nu=state.mu))


def tied(params):
    """Layers' arrays that are two parameters, and an array outside that is one of them too."""
    params["blocks"] |= {"gain": params["blocks"]["up"], "bias": jnp.ones(LAYERS)}
    params["final"] = params["blocks"]["bias"]
    step = tiny_lm.released(optax.sgd(0.01, 0.9))
    return step, step.init(params)


def one_buffer(params):
    """As `one_array`, in arrays of their own that have the same memory."""
    step, (params, state) = one_array(params)
    there = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    return step, jax.device_put((params, state), there)


@pytest.mark.quick("one_array-{'persist': 1}", "tied-{'persist': 0}", "one_buffer-{'persist': 0}")
@pytest.mark.parametrize("how", PLACES, ids=str)
@pytest.mark.parametrize("share", [one_array, tied, one_buffer])
def test_what_shares_memory_is_split_and_joined_as_what_does_not(share, how):
    step, state = share(tiny_lm.parameters(np.float32, layers=LAYERS))
    want = jax.tree.map(np.asarray, state)
    there = step.split(jax.tree.map(jnp.copy, state), **how)
    made = step.split(state, **how)
    where = lambda a: (a.shape, a.dtype, a.sharding)
    assert jax.tree.map(where, made) == jax.tree.map(where, there)
    same(made, there)
    assert all(a.is_deleted() for a in jax.tree.leaves(state[0]["blocks"]["up"]))
    same(step.joined(made), want)


@pytest.mark.parametrize("share", [one_array, one_buffer])
def test_arrays_that_share_host_memory_are_joined(share):
    step, (params, state) = share(tiny_lm.parameters(np.float32, layers=LAYERS))
    params, state = step.split((params, state), 1)
    state = state._replace(mu=state.nu)
    want = jax.tree.map(np.asarray, state.nu["blocks"])
    _, joined = step.joined((params, state))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *want.parts)
    same([joined.mu["blocks"], joined.nu["blocks"]], [whole, whole])
    assert all(a.is_deleted() for a in jax.tree.leaves(state.nu["blocks"]))


def test_an_array_that_stays_in_one_of_its_places_is_not_deleted():
    params = tiny_lm.parameters(np.float32, layers=LAYERS)
    params["blocks"]["bias"] = params["final"] = jnp.arange(float(LAYERS))
    step = tiny_lm.released(jaxmem.adama(0.01))
    (made, _), bias = step.split(step.init(params), 0), params["final"]
    assert made["blocks"]["bias"].sharding.memory_kind == "pinned_host"
    assert not bias.is_deleted()
    same(made["final"], jnp.arange(float(LAYERS)))
    assert params["blocks"]["up"].is_deleted()
