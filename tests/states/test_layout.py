"""Where a state's arrays lie: split, joined, and made in their places. Each place of an array that
stands in a state more than once gets what it asks for, and nothing is deleted that another place
still has.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem._model.states import layout
from jaxmem._model.states.layout import Copied, Stacks, buffers_of, parts_of
from jaxmem._model.states.places import Places
from tests.shared import tiny_lm

pytestmark = pytest.mark.core
LAYERS = 4


def released():
    tx = jaxmem.adama(0.01, mu_dtype="bfloat16", accumulation_steps=2)
    return tiny_lm.released(tx)


def first():
    """A state of which every number is another one."""
    state = released().init(tiny_lm.parameters(np.float32, layers=LAYERS))
    leaves, structure = jax.tree.flatten(state)
    count = lambda i, a: (1000 * i + jnp.arange(a.size).reshape(a.shape)).astype(a.dtype)
    return jax.tree.unflatten(structure, [count(i, a) for i, a in enumerate(leaves)])


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, (got, want)))


def kinds(tree):
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


OTHERS = (
    {"persist": 1, "copies": 2, "buffers": 1},
    {"persist": 0, "copies": LAYERS},
    {"persist": 2, "outer_moments": "pinned_host"},
)


@pytest.mark.quick("one2-other2", "one3-other3")
@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(OTHERS, 2)])
def test_any_placement_becomes_any_other_and_joins_to_the_same_state(one, other):
    step = released()
    state = step.split(step.split(first(), **one), **other)
    copied = [p for p in parts_of(state[0]["blocks"]) if isinstance(p, Copied)]
    assert len(copied) == ("copies" in other)
    assert all(kinds(p.copy) == {"device"} and kinds(p.master) == {"pinned_host"} for p in copied)
    layers = state[0]["blocks"]
    assert buffers_of(layers) == buffers_of(state[1].mu["blocks"]) == other.get("buffers", 0)
    assert kinds(state[1].nu["embedding"]) == {other.get("outer_moments", "device")}
    same(step.joined(state), first())
    assert all(a.is_deleted() for p in copied for a in jax.tree.leaves(p.copy))


@pytest.mark.quick("0-3", "3-1", "4-0")
@pytest.mark.parametrize("other", [0, 1, 3, LAYERS])
@pytest.mark.parametrize("one", [0, 1, 3, LAYERS])
def test_any_split_becomes_any_other_and_joins_to_the_same_state(one, other):
    step = released()
    state = step.split(step.split(first(), one), other)
    same(step.joined(state), first())
    state = step.split(step.split(first(), one), other)
    layers = [state[0]["blocks"], state[1].mu["blocks"], state[1].nu["blocks"]]
    if 0 < other < LAYERS:
        assert [[kinds(part) for part in x.parts] for x in layers] == [
            [{"device"}, {"pinned_host"}]
        ] * 3
        assert {x.parts[0]["up"].shape[0] for x in layers} == {other}
    else:
        assert [kinds(x) for x in layers] == [{"device" if other else "pinned_host"}] * 3
    assert kinds((state[0]["embedding"], state[1].mu["final"], state[1].count)) == {"device"}


def test_the_joined_state_stays_in_host_memory_where_a_part_of_it_was():
    step = released()
    assert kinds(step.joined(step.split(first(), 2))[0]["blocks"]) == {"pinned_host"}
    assert kinds(step.joined(step.split(first(), LAYERS))[0]["blocks"]) == {"device"}


def test_what_moves_is_deleted_where_it_was():
    """A model that fills a memory could not be moved otherwise."""
    step, state = released(), first()
    new = step.split(state, 1)
    assert all(a.is_deleted() for a in jax.tree.leaves(state[0]["blocks"]))
    again = step.split(new, 1)
    assert not any(a.is_deleted() for a in jax.tree.leaves(new))
    same(step.joined(again), first())


def test_shapes_are_split_as_arrays_are():
    step = released()
    how = {"persist": 1, "copies": 1, "buffers": 1, "outer_moments": "pinned_host"}
    shapes = step.split(jax.eval_shape(first), **how)
    arrays = step.split(first(), **how)
    like = lambda a: (a.shape, a.dtype, a.sharding.memory_kind, a.sharding.spec)
    assert jax.tree.map(like, shapes) == jax.tree.map(like, arrays)


@pytest.mark.parametrize("how", [{"persist": 0}, {"persist": 1}, {"persist": LAYERS}, *OTHERS])
def test_a_state_that_is_created_a_layer_at_a_time_is_the_split_first_state(how):
    step, params = released(), tiny_lm.parameters(np.float32, layers=LAYERS)
    layers = params.pop("blocks")
    made = step.create(params, lambda i: jax.tree.map(lambda a: a[i], layers), LAYERS, **how)
    whole = step.split(step.init(params | {"blocks": layers}), **how)
    assert jax.tree.structure(made) == jax.tree.structure(whole)
    where = lambda a: (a.dtype, a.sharding)
    assert jax.tree.map(where, made) == jax.tree.map(where, whole)
    same(made, whole)


def test_nothing_is_copied_where_nothing_moves():
    layers = {"a": jnp.ones((3, 2))}
    here = Places(3, 3)
    again = layout.split(layout.split(layers, here), here)
    assert again["a"].unsafe_buffer_pointer() == layers["a"].unsafe_buffer_pointer()
    assert not isinstance(again, Stacks)


PLACES = (
    {"persist": 0},
    {"persist": 1},
    {"persist": 0, "copies": 2, "outer_moments": "pinned_host"},
)


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
