"""Steps whose arguments hold more than arrays: Equinox modules, functions, words."""

from typing import NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._trace.filtered import Filtered, Tree, traced_leaves
from jaxmem._trace.step import trace
from jaxmem.errors import StepError
from tests.shared.foreign.size import normal

pytestmark = pytest.mark.jax_defaults


def step(state, x, mode):
    model, count = state
    gradients = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
    model = eqx.apply_updates(model, jax.tree.map(lambda g: -g, gradients))
    return (model, count + 1), {"mode": mode, "name": "step"}


def given():
    model = eqx.nn.MLP(8, 8, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    return (model, jnp.zeros((), jnp.int32)), normal(1, 4, 8, dtype=jnp.float32), "a"


def test_equal_static_leaves_of_other_types_are_other_arguments():
    _, x, _ = given()
    of = lambda p: Tree.of(((eqx.nn.Dropout(p), x), {}))[1]
    assert of(1) == of(1)
    assert of(1) != of(True)
    assert of(1) != of(1.0)
    assert "is True, and was 1" in of(True).difference(of(1))


def test_keywords_are_donated_and_other_options_are_refused():
    state, x, mode = given()
    traced = Filtered(step, donate_argnames="state").trace(state=state, x=x, mode=mode).traced
    _, named = traced.args_info
    donated = lambda name: {info.donated for info in jax.tree.leaves(named[name])}
    assert donated("state") == {True}
    assert donated("x") == {False}
    with pytest.raises(StepError, match="static_argnames.*donate_argnums"):
        Filtered(step, static_argnames="mode")


def test_what_is_no_array_belongs_to_the_program():
    state, x, mode = given()
    assert not all(traced_leaves((state, x, mode)))
    assert all(traced_leaves((x, 1.0, jax.ShapeDtypeStruct((3,), jnp.float32), None)))
    (want, _), _ = step(state, x, mode)
    compiled = Filtered(step, donate_argnums=0).trace(state, x, mode).lower().compile()
    first = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    (got, count), words = compiled(state, x, mode)
    assert words == {"mode": "a", "name": "step"}
    assert int(count) == 1
    assert got.activation is want.activation
    arrays = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    for a, b in zip(arrays(got), arrays(want), strict=True):
        assert float(np.abs(np.subtract(a, b)).max()) < 1e-6
    assert all(leaf.is_deleted() for leaf in first), "the first argument is donated"


def test_what_is_no_array_may_not_change():
    state, x, mode = given()
    compiled = Filtered(step, donate_argnums=0).trace(state, x, mode).lower().compile()
    message = r"something that is no array .* `args\[2\]` is 'b', and was 'a'"
    with pytest.raises(StepError, match=message):
        compiled(state, x, "b")
    with pytest.raises(StepError, match="the structure of `args`"):
        compiled(state, [x], "a")


class Dropped(eqx.Module):
    """A layer whose leaves beside arrays are numbers: `drop.p`, and `drop.inference`, a bool."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, key, width=8):
        one, two = jax.random.split(key)
        self.up = eqx.nn.Linear(width, 4 * width, key=one)
        self.down = eqx.nn.Linear(4 * width, width, key=two)
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x, key):
        return x + self.drop(jax.vmap(self.down)(jnp.tanh(jax.vmap(self.up)(x))), key=key)


class Moments(NamedTuple):
    """A state as optax has them."""

    count: int
    rate: float


@flax.struct.dataclass
class Trained:
    """A state as Flax has them, whose first step is Python's own 0."""

    step: int
    params: jax.Array


def compiled_for(step, *args):
    return trace(lambda plan: step, None, args)[0].lower().compile()


def dropped_step(layers, x, key, others):
    """Trains layers. others: numbers in plain containers, which it counts up."""

    def loss(layers, x):
        for layer in layers:
            x = layer(x, key)
        return (x**2).mean()

    gradients = eqx.filter_grad(loss)(layers, x)
    layers = eqx.apply_updates(layers, jax.tree.map(lambda g: -0.1 * g, gradients))
    return layers, jax.tree.map(lambda n: n + 1, others)


def dropped_args():
    layers = [Dropped(key) for key in jax.random.split(jax.random.key(0), 2)]
    return layers, normal(1, 4, 8, dtype=jnp.float32), jax.random.key(1)


def test_numbers_of_a_module_are_static_and_those_of_plain_containers_are_traced():
    layers, x, key = dropped_args()
    first = {"rate": 0.5, "of": [Moments(1, 0.1), Trained(0, x)]}
    assert not all(traced_leaves((layers,)))
    assert all(traced_leaves((first,)))
    want, _ = eqx.filter_jit(dropped_step)(layers, x, key, first)
    compiled = compiled_for(dropped_step, layers, x, key, first)
    got, counted = compiled(layers, x, key, first)
    assert got[1].drop.inference is False
    assert jnp.allclose(got[1].up.weight, want[1].up.weight, rtol=1e-6)
    _, counted = compiled(got, x, key, counted)
    assert (float(counted["rate"]), int(counted["of"][0].count)) == (2.5, 3)
    assert int(counted["of"][1].step) == 2


def test_numbers_of_plain_containers_are_traced_beside_a_function():
    compiled = compiled_for(lambda x, rate, f: f(x) * rate, jnp.ones(3), 2.0, jnp.tanh)
    assert float(compiled(jnp.zeros(3) + 1, 4.0, jnp.tanh)[0]) == pytest.approx(4 * jnp.tanh(1.0))


def test_a_module_may_be_returned_with_another_bool_and_is_another_then():
    layers, x, _ = dropped_args()
    step = lambda layers, x: (eqx.nn.inference_mode(layers), x)
    compiled = compiled_for(step, layers, x)
    (_, last), _ = compiled(layers, x)
    assert last.drop.inference is True
    message = r"`args\[0\]\[0\].drop.inference` is True, and was False"
    with pytest.raises(StepError, match=message):
        compiled([last, last], x)


def test_a_module_with_a_state_keeps_its_words():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")

    def step(given, x):
        norm, state = given
        batched = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = batched(x, state)
        return (norm, state), out

    x = normal(1, 4, 8, dtype=jnp.float32)
    compiled = compiled_for(step, (norm, state), x)
    given, first = compiled((norm, state), x)
    _, second = compiled(given, x)
    assert given[0].mode == "batch"
    assert jnp.allclose(first.mean(0), 0, atol=1e-5)
    assert (first == second).all()


@pytest.mark.parametrize("function", [None, jnp.tanh], ids=["arrays alone", "a function"])
def test_an_error_about_an_argument_names_its_path(function):
    def step(params, options, function):
        def loss(params, scales):
            return sum(params.sum() for scale in scales["of"] if scale > 0)

        return jax.grad(loss)(params, {"of": [1.0, options["scale"]]})

    args = jnp.ones((4, 4)), {"scale": 2.0}, function
    with pytest.raises(StepError, match=r"the argument options\['scale'\]"):
        trace(lambda plan: step, None, args)
    with pytest.raises(StepError, match=r"the argument scales\['of'\]\[1\]"):
        trace(jaxmem.auto(step), Assignment.nothing(), args)


def test_shapes_are_enough_to_trace_and_arguments_keep_their_names():
    state, x, mode = given()
    shapes = eqx.filter_eval_shape(lambda s: s, state)
    stage, traced = trace(lambda plan: step, None, (shapes, x, mode))
    assert stage.traced is traced
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(traced.args_info)]
    assert any("layers[0].weight" in path for path in paths)


def test_a_model_whose_words_are_only_numbers_is_planned_and_run():
    make = lambda key: Dropped(key, 32)
    layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 4))

    def whole(layers, x, key):
        def loss(layers):
            arrays, rest = eqx.partition(layers, eqx.is_array)
            turn = lambda x, one: (eqx.combine(one, rest)(x, key), None)
            return (jax.lax.scan(turn, x, arrays)[0] ** 2).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(layers)
        return eqx.apply_updates(layers, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    given = layers, normal(1, 256, 32, dtype=jnp.float32), jax.random.key(1)
    plan = jaxmem.plan(jaxmem.auto(whole), *given, budget="1MiB", actions="lossless")
    assert plan.compiled_bytes <= 2**20 < plan.baseline_bytes
    _, want = whole(*given)
    trained, got = plan.step(*given)
    assert float(got) == pytest.approx(float(want))
    assert trained.drop == eqx.nn.Dropout(0.5)
