"""Sums of rows with random signs: what signs have in common, and that no result depends on where an
array lies.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._optim.adama import rows
from tests.shared import children, row_oracle

pytestmark = [
    pytest.mark.core,
    pytest.mark.standard_promotion,
]
SHAPES = [(3, 4), (2, 300), (2, 3, 16, 8), (5,), ()]


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


@given(st.integers(0, 2**31 - 1), st.sampled_from([*SHAPES, *MORE]))
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
