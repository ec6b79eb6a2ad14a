"""A released step whose layers' states lie in host memory: the values of the resident step, and
where its state and the rows of the row ratio lie before and after.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import Choice
from jaxmem._core.assignment import Assignment
from jaxmem._model.states.layout import Stacks
from jaxmem.errors import OptimizerError, StackError, TagError
from tests.shared import tiny_lm
from tests.shared.compare import pairs
from tests.shared.streamed import (
    LAYERS,
    close,
    moved,
    no_bit_depends,
    parameters,
    places,
    split_at,
    tokens,
    train,
)  # fmt: skip

grouped = Assignment(
    {
        "block[0:2]": {"in": Choice("recompute"), "up": Choice("recompute")},
        "block[2:4]": {"in": Choice("keep"), "up": Choice("keep")},
    }
)


def schedule(count):
    return 0.03 / (1.0 + count)


def matrices(params):
    """Decays the stacked matrices and the embedding: a layer alone has an axis less."""
    return jax.tree.map(lambda a: a.ndim > 1, params)


def decaying(n, **options):
    # A larger eps, so that rounding is not magnified where a gradient is nearly zero.
    given = {"eps": 1e-3, "weight_decay": 0.1, "mask": matrices}
    return jaxmem.adamaw_a(schedule, accumulation_steps=n, **given | options)


def row(n, **options):
    return decaying(n, second_moment="row", **options)


@functools.cache
def resident(n, steps, clip=None, optimizer=decaying):
    step = tiny_lm.released(optimizer(n), clip=clip)
    return train(step, step.init(parameters()), steps)[0]


@pytest.mark.quick("3-0-4", "3-1-1", "3-3-4")
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("persist", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("steps", [3, 20])
def test_values_are_those_of_a_resident_state(n, persist, steps):
    step = tiny_lm.released(decaying(n))
    found, kinds = train(step, step.split(step.init(parameters()), persist), steps)
    assert kinds == split_at(persist)
    assert moved(found[0][0]) > 1e-3
    close(found, resident(n, steps))


@pytest.mark.quick("3-4-0")
@pytest.mark.parametrize("persist", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("steps", [3, 20])
def test_no_bit_depends_on_where_states_lie(n, persist, steps, optimized):
    no_bit_depends(tiny_lm.released(decaying(n)), persist, steps)


@pytest.mark.quick("4-0")
@pytest.mark.parametrize("persist", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("n", [1, 4])
def test_no_bit_depends_on_where_states_lie_if_the_norm_is_clipped(n, persist, optimized):
    step = tiny_lm.released(decaying(n), clip=("norm", 0.1))
    no_bit_depends(step, persist, 3)


PLACES = {  # what split is asked, and the memories of each stack
    "copies alone": ({"persist": 0, "copies": LAYERS}, [{"device", "pinned_host"}]),
    "buffers alone": ({"persist": 0, "buffers": LAYERS}, [{"pinned_host"}]),
    "some buffers": ({"persist": 0, "buffers": 2}, [{"pinned_host"}]),
    "of each kind": (
        {"persist": 1, "copies": 1, "buffers": 1, "outer_moments": "pinned_host"},
        [{"device"}, {"device", "pinned_host"}, {"pinned_host"}],
    ),
}


@pytest.mark.quick("of each kind-None-1", "of each kind-bfloat16-1")
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", PLACES)
def test_copies_buffers_and_moments_beside_change_no_value(name, dtype, n):
    how, where = PLACES[name]
    step = tiny_lm.released(decaying(n), dtype=dtype)
    found, kinds = train(step, step.split(step.init(parameters()), **how), 3)
    assert kinds == where
    assert moved(found[0][0]) > 1e-3
    # Across splits XLA fuses, and so rounds, otherwise: in bfloat16 by its own precision.
    want, _ = train(step, step.split(step.init(parameters()), 0), 3)
    close(found, want, 1e-6 if dtype is None else 1e-4)


def test_a_copy_is_what_the_master_is_in_the_dtype_of_compute():
    step = tiny_lm.released(jaxmem.adama(0.01), dtype="bfloat16")
    state = step.split(step.init(parameters()), 0, copies=LAYERS)
    for _ in range(2):
        state, _ = jax.jit(step, donate_argnums=0)(state, tokens(0))
        part = state[0]["blocks"]
        assert {a.dtype for a in jax.tree.leaves(part.copy)} == {jnp.dtype("bfloat16")}
        for copy, master in pairs(part.copy, part.master):
            np.testing.assert_array_equal(copy, master.astype(copy.dtype))


def test_what_is_outside_has_its_moments_in_host_memory_before_and_after():
    step = tiny_lm.released(decaying(2))
    state = step.split(step.init(parameters()), LAYERS, outer_moments="pinned_host")
    for _ in range(2):
        kinds = lambda tree: {a.sharding.memory_kind for k, a in tree.items() if k != "blocks"}
        assert kinds(state[1].mu) == kinds(state[1].nu) == {"pinned_host"}
        assert kinds(state[0]) == {"device"}
        state, _ = jax.jit(step, donate_argnums=0)(state, tokens(0))
    assert places(state) == [{"device"}]


@pytest.mark.quick("clip0", "clip2")
@pytest.mark.parametrize("clip", [("value", 0.01), ("component", 0.1), ("norm", 0.1)])
def test_clipping_is_that_of_a_resident_state(clip):
    step = tiny_lm.released(decaying(2), clip=clip)
    found, _ = train(step, step.split(step.init(parameters()), 1), 3)
    close(found, resident(2, 3, clip))
    assert found[1][0]["grad_norm"] > clip[1], "it clips"


@pytest.mark.quick("plan1")
@pytest.mark.parametrize("plan", [None, grouped])
def test_plans_keys_and_auxiliary_outputs_go_with_it(plan):
    def block(p, x, *shared, key):
        y = tiny_lm.block(p, x, *shared, key=key)
        return y, (y * y).mean()

    head = lambda outer, x, aux, batch: tiny_lm.head(outer, x, batch) + 0.1 * (aux**2).sum()
    step = jaxmem.released_step(
        decaying(2), tiny_lm.embed, block, head, layers="blocks", has_aux=True, plan=plan
    )
    run = lambda state: train(step, state, 2, jax.random.key(3))
    (want, metrics), _ = run(step.init(parameters()))
    (found, streamed), kinds = run(step.split(step.init(parameters()), 1))
    assert kinds == [{"device"}, {"pinned_host"}]
    close((found, streamed), (want, metrics))


def test_what_does_not_fit_is_refused():
    step = tiny_lm.released(jaxmem.adama(0.01))
    for persist in (-1, LAYERS + 1, True, 1.0, None):
        with pytest.raises(OptimizerError, match=r"`persist` is .*; expected .* 0 to 4"):
            step.split(step.init(parameters()), persist)
    for more, match in (
        ({"copies": 4}, "`copies` is 4; expected .* 0 to 3, after persist=1"),
        ({"copies": 2, "buffers": 2}, "`buffers` is 2; .* 0 to 1, after persist=1 and copies=2"),
        ({"outer_moments": "host"}, "`outer_moments` is 'host'; expected .*'pinned_host'"),
    ):
        with pytest.raises(OptimizerError, match=match):
            step.split(step.init(parameters()), 1, **more)
    with pytest.raises(OptimizerError, match="expected a dict with 'blocks'.*no stack"):
        step.split(({"w": jnp.ones(3)}, None), 1)
    state = step.split(step.init(parameters()), 1)
    uneven = Stacks(
        (state[0]["blocks"].parts[0], {"up": jnp.ones((3, 2)), "down": jnp.ones((2, 2))})
    )
    with pytest.raises(StackError, match="holds 3 layers"):
        step((state[0] | {"blocks": uneven}, state[1]), tokens(0))
    wrong = Assignment({"block[0:1]": {"in": Choice("keep"), "up": Choice("keep")}})
    with pytest.raises(TagError, match="there are 4 layers"):
        tiny_lm.released(jaxmem.adama(0.01), plan=wrong)(state, tokens(0))


OF_EACH_KIND = PLACES["of each kind"][0]


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
def test_values_with_rows_are_those_of_a_resident_state(n, where, steps, clip):
    step = tiny_lm.released(row(n), clip=clip)
    found, _ = train(step, step.split(step.init(parameters()), **where), steps)
    (params, state), _ = found
    assert moved(params) > 1e-3
    assert min(float(np.max(a)) for a in jax.tree.leaves(state.square)) > 0
    close(found, resident(n, steps, clip, row))


def test_the_ratio_is_felt():
    """Else all of the above would hold without it."""
    (params, _), _ = resident(4, 3, optimizer=row)
    (plain, _), _ = resident(4, 3)
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
