"""The row ratio: rows and signs, AdamA's second moment scaled by them as an oracle in NumPy does,
and Adam to the bit with one microbatch.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._optim.adama import rows
from jaxmem.errors import OptimizerError
from tests.shared import row_oracle

pytestmark = [
    pytest.mark.core,
    pytest.mark.standard_promotion,
]
SHAPES = {"matrix": (3, 4), "wide": (2, 300), "stack": (2, 3, 16, 8), "bias": (5,), "number": ()}
row = functools.partial(jaxmem.adama, second_moment="row")
row_w = functools.partial(jaxmem.adamaw_a, second_moment="row")


def parameters(dtype=np.float64):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.standard_normal(shape), dtype) for k, shape in SHAPES.items()}


def gradients(count, dtype=np.float64, common=1.0):
    """Gradients that have a part in common, so that ratios lie between their bounds."""
    rng, shared = np.random.default_rng(1), np.random.default_rng(2)
    agree = {k: shared.standard_normal(shape) for k, shape in SHAPES.items()}
    one = lambda k, shape: jnp.asarray(rng.standard_normal(shape) + common * agree[k], dtype)
    return [{k: one(k, shape) for k, shape in SHAPES.items()} for _ in range(count)]


def run(tx, params, grads):
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def schedule(count):
    return 0.1 / (1.0 + count)


@pytest.mark.parametrize(
    ("shape", "rows_shape"),
    [
        ((), ()),
        ((5,), ()),
        ((768, 3072), (768,)),
        ((64, 64), (64,)),
        ((1000, 3), (1000,)),
        ((12, 64), (12,)),
        ((12, 768, 3072), (12, 768)),
        ((12, 64, 64), (12, 64)),
        ((12, 768, 12, 64), (12, 768)),
        ((3, 3, 64, 128), (3, 3)),
        ((3, 3, 64, 256), (3, 3, 64)),
        ((2, 3, 3, 4, 4), (2, 3)),
    ],
)
def test_rows_are_counted_by_all_axes_but_the_last_and_short_ones_take_in_more(shape, rows_shape):
    assert rows.shape_of_rows(shape) == rows_shape
    groups, count, values = row_oracle.rows_of(shape)
    assert math.prod(rows_shape) == groups * count
    assert math.prod(shape) == groups * count * values


@pytest.mark.quick("0.0-1", "0.5-5", "3.0-2")
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("common", [0.0, 0.5, 3.0])
def test_it_agrees_with_its_definition_over_50_minibatches(n, common):
    params, grads = parameters(), gradients(50 * n, common=common)
    decays = {k: k != "bias" for k in params}
    tx = row_w(schedule, 0.8, 0.97, weight_decay=0.05, mask=decays, accumulation_steps=n)
    batches = [
        [lambda _, g=g: jax.tree.leaves(g) for g in grads[i * n : (i + 1) * n]] for i in range(50)
    ]
    want = row_oracle.adama(
        jax.tree.leaves(params), batches, schedule, 0.8, 0.97, decay=0.05,
        decayed=jax.tree.leaves(decays),
    )  # fmt: skip
    got, state = run(tx, params, grads)
    for a, b in zip(jax.tree.leaves(got), want[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert (int(state.count), int(state.folded)) == (50, 0)
    assert not any(np.any(s) for s in jax.tree.leaves(state.sketch))


def test_in_the_middle_of_a_minibatch_it_goes_on_from_a_stored_state():
    tx, params, grads = row(0.1, accumulation_steps=3), parameters(), gradients(6)
    want = run(tx, params, grads)
    half = run(tx, params, grads[:4])
    assert any(np.any(s) for s in jax.tree.leaves(half[1].sketch))
    leaves, structure = jax.tree.flatten(half)
    params, state = jax.tree.unflatten(structure, [jnp.asarray(np.asarray(a)) for a in leaves])
    for g in grads[4:]:
        updates, state = jax.jit(tx.update)(g, state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, (params, state), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_with_one_microbatch_it_is_adam_to_the_bit(dtype):
    params, grads = parameters(dtype), gradients(12, dtype)
    got, state = run(row(0.1), params, grads)
    want, adam = run(jaxmem.adama(0.1), params, grads)
    jax.tree.map(np.testing.assert_array_equal, (got, state.mu, state.nu), (want, adam.mu, adam.nu))


def test_equal_microbatches_are_adam_once_their_ratio_has_settled():
    """With gradients that never change but in sign, Adam's second moment is N times AdamA's."""
    params, n = parameters(), 4
    base = gradients(1)[0]
    flip = lambda i: jax.tree.map(lambda g: g * (1 if i % 3 else -1), base)
    tx, adam = row(0.01, b2=0.9, accumulation_steps=n), optax.adam(0.01, b2=0.9)
    # Signs are random, so that ratios wander; a clip at N keeps them from passing it.
    got, state = run(tx, params, [flip(i // n) for i in range(60 * n)])
    want, _ = run(adam, params, [flip(i) for i in range(60)])
    plain, _ = run(
        jaxmem.adama(0.01, b2=0.9, accumulation_steps=n),
        params,
        [flip(i // n) for i in range(60 * n)],
    )
    distance = lambda a: sum(
        float(((x - y) ** 2).sum()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(want))
    )
    assert distance(got) < 0.2 * distance(plain)
    assert int(state.count) == 60


def test_complex_gradients_have_real_squares():
    rng = np.random.default_rng(0)
    make = lambda: {
        "w": jnp.asarray(rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4)))
    }
    params, grads = make(), [make() for _ in range(8)]
    tx = row(0.1, accumulation_steps=2)
    got, state = run(tx, params, grads)
    assert state.square["w"].dtype == np.float64
    assert state.sketch["w"].dtype == np.complex128
    plain, _ = run(jaxmem.adama(0.1, accumulation_steps=2), params, grads)
    assert np.all(np.abs(got["w"] - params["w"]) <= np.abs(plain["w"] - params["w"]) * 1.5)


def test_gradients_may_be_numbers():
    tx = row(0.1, accumulation_steps=2)
    state = tx.init({"a": jnp.ones(())})
    for _ in range(2):
        updates, state = tx.update({"a": 0.5}, state, {"a": 1.0})
    np.testing.assert_allclose(updates["a"], -0.1, rtol=1e-6)


def test_without_rows_a_state_is_what_it_was():
    """So that stored ones are read."""
    assert jaxmem.adama(0.1).init(parameters())._fields == ("count", "folded", "mu", "nu")


def test_bfloat16_gradients_are_summed_in_float32():
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), parameters())
    tx = row(0.1, accumulation_steps=2)
    state = tx.init(params)
    assert {a.dtype for a in jax.tree.leaves((state.square, state.sketch))} == {
        jnp.dtype("float32")
    }
    got, _ = run(tx, params, gradients(4, jnp.bfloat16))
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(got))


def test_it_is_used_inside_of_optaxs_wrappers():
    params, grads = parameters(), gradients(4)
    injected = optax.inject_hyperparams(jaxmem.adama)
    tx = injected(learning_rate=0.1, accumulation_steps=2, second_moment="row")
    got, _ = run(tx, params, grads)
    want, _ = run(row(0.1, accumulation_steps=2), params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)
    masked = optax.masked(row(0.1, accumulation_steps=2), {k: k != "bias" for k in params})
    got, _ = run(masked, params, grads)
    np.testing.assert_allclose(got["matrix"], want["matrix"], rtol=1e-12)


def test_another_second_moment_or_another_states_is_refused():
    with pytest.raises(OptimizerError, match="`second_moment` is 'rows'; expected 'squares'"):
        row(0.1) and jaxmem.adama(0.1, second_moment="rows")
    params = parameters()
    grads = gradients(1)[0]
    with pytest.raises(OptimizerError, match="the state has no rows, as that of 'squares'"):
        row(0.1).update(grads, jaxmem.adama(0.1).init(params), params)
    for part in (row(0.1).begin, row(0.1).finish, lambda s: row(0.1).fold(s, grads)):
        with pytest.raises(OptimizerError, match="the state has no rows"):
            part(jaxmem.adama(0.1).init(params))
    with pytest.raises(OptimizerError, match="the state has rows, unlike that of 'squares'"):
        jaxmem.adama(0.1).update(grads, row(0.1).init(params), params)


def test_ranks_need_not_be_promoted():
    with jax.numpy_rank_promotion("raise"):
        run(row_w(0.1, accumulation_steps=2), parameters(), gradients(4))
