"""The row ratio: rows and signs, AdamA's second moment scaled by them as an oracle in NumPy does,
and Adam to the bit with one microbatch. Sums of rows have random signs: what signs have in common,
and that no result depends on where an array lies.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem._optim.adama import rows
from jaxmem.errors import OptimizerError
from tests.adama.test_transform import agrees_over_50_minibatches, run
from tests.shared import children, row_oracle
from tests.shared.compare import pairs

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


@pytest.mark.parametrize(
    ("shape", "rows_shape"),
    [
        ((), ()),
        ((5,), ()),
        ((768, 3072), (768,)),
        ((1000, 3), (1000,)),
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
    params = parameters()
    decays = {k: k != "bias" for k in params}
    given = row_w, row_oracle, n, params, gradients(50 * n, common=common)
    state = agrees_over_50_minibatches(*given, decays)
    assert not any(np.any(s) for s in jax.tree.leaves(state.sketch))


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
    squares = jaxmem.adama(0.01, b2=0.9, accumulation_steps=n)
    plain, _ = run(squares, params, [flip(i // n) for i in range(60 * n)])
    distance = lambda a: sum(float(((x - y) ** 2).sum()) for x, y in pairs(a, want))
    assert distance(got) < 0.2 * distance(plain)
    assert int(state.count) == 60


def test_complex_gradients_have_real_squares():
    rng = np.random.default_rng(0)
    values = lambda: rng.standard_normal((3, 4))
    make = lambda: {"w": jnp.asarray(values() + 1j * values())}
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
    assert {a.dtype.name for a in jax.tree.leaves((state.square, state.sketch))} == {"float32"}
    got, _ = run(tx, params, gradients(4, jnp.bfloat16))
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(got))


def test_it_is_used_inside_of_optaxs_wrappers():
    params, grads = parameters(), gradients(4)
    want, _ = run(row(0.1, accumulation_steps=2), params, grads)
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


ARRAYS = [(3, 4), (2, 300), (2, 3, 16, 8), (5,), ()]


@jax.jit
def sums(g, step):
    """The signed sums of an array's rows."""
    return rows.Position(step).sums(g, jnp.zeros(rows.shape_of_rows(g.shape)))


def test_the_square_of_a_signed_sum_is_on_average_the_squared_norm():
    g = jnp.asarray(np.random.default_rng(3).standard_normal((4, 300)))
    found = np.asarray(jax.vmap(lambda step: sums(g, step))(jnp.arange(4000)) ** 2).mean(0)
    # The variance of such a square is at most twice its mean's square.
    assert np.abs(found / np.asarray((g**2).sum(1)) - 1).max() < 5 * (2 / 4000) ** 0.5


@pytest.mark.quick("2", "111")
@pytest.mark.parametrize("count", [2, 40, 64, 96, 37 * 3])
def test_rows_that_are_alike_err_apart(count):
    """The mean of their squares has the variance of that many independent ones, or of 32."""
    g = jnp.broadcast_to(jnp.asarray(np.random.default_rng(3).standard_normal(64)), (count, 64))
    found = np.asarray(jax.vmap(lambda step: sums(g, step))(jnp.arange(2000)))
    relative = (found**2).mean(1) / float((g[0] ** 2).sum())
    assert abs(relative.mean() - 1) < 5 * (2 / min(count, 32) / 2000) ** 0.5
    assert relative.var() < 1.3 * 2 / min(count, 32)


@pytest.mark.quick("1", "768")
@pytest.mark.parametrize("apart", [1, 2, 3, 64, 768, 65536])
def test_signs_of_two_values_have_nothing_in_common_over_steps_or_places(apart):
    signs = lambda step, length: rows.Position(step).signs((length,), (length,), 0)[0]
    of_steps = jax.jit(jax.vmap(lambda step: signs(step, 2**17 + apart)))
    several = np.asarray(of_steps(jnp.arange(8)))
    several = several.astype(np.float64)
    of_pairs = several[:, apart:] * several[:, :-apart]
    assert np.abs(of_pairs.mean(1)).max() < 5 / 2**8.5  # one step
    assert abs(of_pairs.mean()) < 5 / 2**10
    assert abs(several.mean()) < 5 / 2**10
    assert abs((several[1:] * several[:-1]).mean()) < 5 / 2**10
    # One pair over many steps.
    ends = jax.vmap(lambda step: signs(step, apart + 1)[jnp.array([0, -1])])
    found = np.asarray(jax.lax.map(lambda steps: ends(steps), jnp.arange(4096).reshape(64, 64)))
    assert abs(found.prod(-1).mean()) < 5 / 64


MORE = [(64, 3), (66, 2), (37, 2), (2, 64, 4), (3, 12, 8), (2, 3, 40, 8), (0, 4), (4, 0)]


@given(st.integers(0, 2**31 - 1), st.sampled_from([*ARRAYS, *MORE]))
def test_sums_are_those_of_the_definition(step, shape):
    g = np.random.default_rng(0).standard_normal(shape)
    got = sums(jnp.asarray(g), jnp.int32(step))
    signed = row_oracle.signs(shape, step) * g if g.size else g
    want = signed.reshape(*got.shape, -1).sum(-1) if g.size else np.zeros(got.shape)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.quick("shape0", "shape2")
@pytest.mark.parametrize("shape", [(5, 48, 4), (2, 4, 8, 256), (2, 3, 3, 16, 256), (2, 4, 3, 4)])
def test_layers_have_the_same_signs_stacked_and_alone(shape):
    whole = jnp.asarray(np.random.default_rng(0).standard_normal(shape))
    want, alone = sums(whole, 7), rows.Position(7, stacked=False)
    for layer, of_layer in zip(whole, want):
        got = jax.jit(alone.sums)(layer, of_layer)
        np.testing.assert_allclose(got, of_layer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(577, 1, 16), (40, 2, 8), (7, 7, 1, 4), (12, 12, 4)])
def test_rows_of_an_array_that_is_no_stack_err_apart_along_all_axes(shape):
    count = math.prod(rows.shape_of_rows(shape))
    g = jnp.broadcast_to(jnp.asarray(np.random.default_rng(3).standard_normal(shape[-1])), shape)
    like = jnp.zeros(rows.shape_of_rows(shape))
    of = lambda step: (rows.Position(step, stacked=False).sums(g, like) ** 2).mean()
    found = np.asarray(jax.lax.map(of, jnp.arange(1500)))
    assert found.var() / found.mean() ** 2 < 1.3 * 2 / min(count, 32)


@pytest.mark.quick(
    "shape0-True-2", "shape1-False-3", "shape2-True-3", "shape2-False-2", "shape4-False-2"
)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("shape", [(64, 12), (96, 3), (2, 3, 40, 256), (4, 12, 64), (12,)])
def test_parts_have_the_signs_of_the_whole(shape, stacked, devices):
    """Along every axis that the devices divide: sums of parts of rows add up, others are parts."""
    g = np.random.default_rng(0).standard_normal(shape)
    axes = len(rows.shape_of_rows(shape))
    divided = [axis for axis, length in enumerate(shape) if length % devices == 0]
    assert divided
    position = rows.Position(5, jnp.asarray(g), "devices", stacked)
    want = jax.jit(rows.Position(5, stacked=stacked).sums)(g, jnp.zeros(shape[:axes]))
    for axis in divided:
        parts = np.stack(np.split(g, devices, axis))
        of = lambda part: position.sums(part, jnp.zeros(part.shape[:axes]))
        got = np.asarray(jax.jit(jax.vmap(of, axis_name="devices"))(parts))
        got = got.sum(0) if axis >= axes else np.concatenate(got, axis)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_over_a_mesh_whole_gradients_stay_where_they_are():
    found = children.printed(children.with_cpus(8), "tests.programs.row_meshes")
    assert found == {"checked": 20}
