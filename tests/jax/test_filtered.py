"""Steps whose arguments hold more than arrays: Equinox modules, functions, words."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._jax.filtered import Filtered, takes_more_than_arrays
from jaxmem._jax.step import trace
from jaxmem.errors import StepError
from tests.shared.foreign.size import normal

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compiles")]


def step(state, x, mode):
    model, count = state
    gradients = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
    model = eqx.apply_updates(model, jax.tree.map(lambda g: -g, gradients))
    return (model, count + 1), {"mode": mode, "name": "step"}


def given():
    model = eqx.nn.MLP(8, 8, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    return (model, jnp.zeros((), jnp.int32)), normal(1, 4, 8, dtype=jnp.float32), "a"


def test_what_is_no_array_belongs_to_the_program():
    state, x, mode = given()
    assert takes_more_than_arrays((state, x, mode))
    assert not takes_more_than_arrays((x, 1.0, jax.ShapeDtypeStruct((3,), jnp.float32), None))
    (want, _), _ = step(state, x, mode)
    compiled = Filtered(step).trace(state, x, mode).lower().compile()
    first = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    (got, count), words = compiled(state, x, mode)
    assert words == {"mode": "a", "name": "step"}
    assert int(count) == 1
    assert got.activation is want.activation
    arrays = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    for a, b in zip(arrays(got), arrays(want), strict=True):
        assert float(jnp.abs(a - b).max()) < 1e-6
    assert all(leaf.is_deleted() for leaf in first), "the first argument is donated"


def test_what_is_no_array_may_not_change():
    state, x, mode = given()
    compiled = Filtered(step).trace(state, x, mode).lower().compile()
    with pytest.raises(StepError, match="an argument differs in something that is no array"):
        compiled(state, x, "b")


def test_shapes_are_enough_to_trace_and_arguments_keep_their_names():
    state, x, mode = given()
    shapes = eqx.filter_eval_shape(lambda s: s, state)
    stage, traced = trace(lambda plan: step, None, (shapes, x, mode))
    assert stage.traced is traced
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(traced.args_info)]
    assert any("layers[0].weight" in path for path in paths)


def test_an_equinox_step_is_planned_and_run():
    class Layer(eqx.Module):
        mlp: eqx.nn.MLP

        def __init__(self, key):
            self.mlp = eqx.nn.MLP(32, 32, 64, 1, activation=jnp.tanh, key=key)

    layers = eqx.filter_vmap(Layer)(jax.random.split(jax.random.key(0), 4))

    def whole(layers, x):
        def loss(layers):
            arrays, rest = eqx.partition(layers, eqx.is_array)
            turn = lambda x, one: (x + jax.vmap(eqx.combine(one, rest).mlp)(x), None)
            return (jax.lax.scan(turn, x, arrays)[0] ** 2).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(layers)
        return eqx.apply_updates(layers, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    x = jax.random.normal(jax.random.key(1), (256, 32))
    plan = jaxmem.plan(jaxmem.auto(whole), layers, x, budget="500KiB", actions="lossless")
    assert plan.compiled_bytes <= 500 * 2**10 < plan.baseline_bytes
    want, _ = whole(layers, x)
    got, _ = plan.step(layers, x)
    arrays = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    for a, b in zip(arrays(got), arrays(want), strict=True):
        assert float(jnp.abs(a - b).max()) < 1e-5
