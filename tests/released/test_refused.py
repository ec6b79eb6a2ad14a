"""Parameters that no state can be made for, and calls where arrays lie nowhere, are refused, with
what was got and what to do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.errors import OptimizerError, StackError
from tests.shared import tiny_lm

pytestmark = [
    pytest.mark.core,
    pytest.mark.jax_defaults,
]
OPTIMIZERS = {"adama": jaxmem.adama(0.01), "lion": optax.lion(0.01)}


def parameters(**layers):
    """The parameters, with these layers where some are given."""
    params = tiny_lm.parameters(np.float32)
    return params | {"blocks": layers or params["blocks"]}


@pytest.fixture(params=OPTIMIZERS)
def step(request):
    return tiny_lm.released(OPTIMIZERS[request.param])


NO_STACKS = {
    "no array": ({"none": None}, r"`params\['blocks'\]` holds no array"),
    "no layer": (
        {"w": jnp.ones((0, 2))},
        r"`params\['blocks'\]\['w'\]` has shape \(0, 2\); .*at least one",
    ),
    "no axis": ({"w": jnp.ones(())}, r"`params\['blocks'\]\['w'\]` has shape \(\)"),
    "uneven": (
        {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))},
        r"`params\['blocks'\]\['b'\]` holds 3 layers, and `params\['blocks'\]\['a'\]` 2",
    ),
}


@pytest.mark.parametrize("layers", NO_STACKS)
def test_layers_that_are_no_stacks_are_refused(layers, step):
    layers, said = NO_STACKS[layers]
    with pytest.raises(StackError, match=f"stack: {said}"):
        step.init(parameters(**layers))
    with pytest.raises(StackError, match=f"stack: {said}"):
        step.split((parameters(**layers), step.init(parameters())[1]), 1)
    with pytest.raises(StackError, match=f"stack: {said}"):
        tiny_lm.released(jaxmem.adama(0.01, axis_name="data")).specs(parameters(**layers), 2)


@pytest.mark.parametrize("how", [{"persist": 1}, {"persist": 0, "copies": 3}], ids=str)
def test_a_first_state_of_parameters_that_are_split_is_refused(how, step):
    params, _ = step.split(step.init(parameters()), **how)
    with pytest.raises(OptimizerError, match=r"`params\['blocks'\]` is split already; .*split\("):
        step.init(params)


def test_a_first_state_of_parameters_in_host_memory_is_refused(step):
    params, _ = step.split(step.init(parameters()), 0)
    said = r"`params\['blocks'\]\['down'\]` lies in host memory; .*in device memory.*step.create"
    with pytest.raises(OptimizerError, match=said):
        step.init(params)
    with pytest.raises(OptimizerError, match=said):
        jax.eval_shape(step.init, params)


def test_a_function_that_makes_no_layer_is_refused(step):
    outer = {k: v for k, v in parameters().items() if k != "blocks"}
    with pytest.raises(OptimizerError, match="`layer` returned no array; expected the parameters"):
        step.create(outer, lambda i: {}, 3)


def test_arrays_that_are_traced_are_not_moved(step):
    state, params = step.init(parameters()), parameters()
    outer = {k: v for k, v in params.items() if k != "blocks"}
    layer = lambda i: jax.tree.map(lambda a: a[i], params["blocks"])
    traced = {
        r"split: `state\[0\]\['blocks'\]\['down'\]`": (lambda s: step.split(s, 1), state),
        r"joined: `state\[0\]\['blocks'\]\['down'\]`": (step.joined, state),
        r"create: `outer\['embedding'\]`": (lambda o: step.create(o, layer, 3), outer),
    }
    for said, (function, argument) in traced.items():
        for way in (jax.jit(function), lambda a, f=function: jax.eval_shape(f, a)):
            with pytest.raises(OptimizerError, match=f"{said} is traced, .* outside"):
                way(argument)


def test_a_state_of_numpys_arrays_is_joined(step):
    """As a checkpoint may be read."""
    want = jax.tree.map(np.asarray, step.init(parameters()))
    got = step.joined(want)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), want)


def complex_step(clip, where):
    """A step whose parameters outside the layers, or of the layers, are complex; its state."""
    values = {"outer": 1.0, "layers": 1.0} | {where: 1.0 + 1.0j}
    of = lambda shape, name: jnp.full(shape, values[name], jnp.result_type(values[name]))
    step = jaxmem.released_step(
        jaxmem.adama(0.01),
        lambda outer, batch: batch * jnp.real(outer["gain"]),
        lambda p, x: x * jnp.real(p["w"]),
        lambda outer, x, batch: (x**2).mean(),
        clip=clip,
    )
    return step, step.init({"gain": of(4, "outer"), "layers": {"w": of((3, 4), "layers")}})


@pytest.mark.parametrize(
    ("where", "path"), [("outer", r"\['gain'\]"), ("layers", r"\['layers'\]\['w'\]")]
)
def test_complex_values_are_not_clipped_by_value(where, path):
    step, state = complex_step(("value", 1.0), where)
    said = rf"`clip` is \('value', 1.0\), and `params{path}` is complex64: .* \('component', c\)"
    with pytest.raises(OptimizerError, match=said):
        step(state, jnp.ones((2, 4)))
    # Norms are those of complex numbers too.
    step, state = complex_step(("component", 1e-3), where)
    _, metrics = step(state, jnp.ones((2, 4)))
    assert float(metrics["grad_norm"]) > 1e-3


@pytest.mark.parametrize(
    "tx",
    [
        optax.lookahead(optax.sgd(0.1), 5, 0.5),
        optax.chain(optax.clip(1.0), optax.lookahead(optax.adam(0.1), 5, 0.5)),
    ],
    ids=["alone", "chain"],
)
def test_lookahead_is_refused(tx):
    with pytest.raises(OptimizerError, match=r"`tx` is optax.lookahead.*optax.incremental_update"):
        tiny_lm.released(tx)
