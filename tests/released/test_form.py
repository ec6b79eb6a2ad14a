"""States whose parts do not belong together, parameters that no state can be made for, calls where
arrays lie nowhere, devices that cannot divide a state, and hosts that cannot hold it are refused,
with what was got and what to do.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._model.states import room
from jaxmem._model.states.layout import Stacks
from jaxmem._target.devices import support
from jaxmem.errors import OptimizerError, StackError, TargetError
from tests.shared import meshes, tiny_lm
from tests.shared.refused import refused
from tests.shared.streamed import apart

LAYERS = 4


def released(**options):
    return tiny_lm.released(jaxmem.adama(0.01, **options))


def state(persist, layers=LAYERS, **sizes):
    step = released()
    return step.split(step.init(tiny_lm.parameters(np.float32, layers=layers, **sizes)), persist)


def called(step, state):
    return jax.eval_shape(step, state, tiny_lm.tokens(4).astype(jnp.int32))


def in_parallel(step, state):
    return called(released(axis_name="data").data_parallel(meshes.abstract(2), "states"), state)


WAYS = {
    "call": called,
    "data_parallel": in_parallel,
    "split": lambda step, state: step.split(state, 1),
    "joined": lambda step, state: step.joined(state),
}


@pytest.mark.parametrize("way", ["call", "data_parallel"])
@pytest.mark.parametrize(
    ("params", "mu", "nu", "said"),
    [
        (2, 3, 3, r"`params` as 2 \+ 2, `mu` as 3 \+ 1, `nu` as 3 \+ 1 layers.*split\(state, 2\)"),
        (2, 2, 1, r"`params` as 2 \+ 2, `mu` as 2 \+ 2, `nu` as 1 \+ 3 layers.*split\(state, 2\)"),
        (0, 3, 3, r"`params` as 4, `mu` as 3 \+ 1, `nu` as 3 \+ 1 layers.*split\(state, 3\)"),
        (1, LAYERS, 0, r"`params` as 1 \+ 3, `mu` as 4, `nu` as 4 layers.*split\(state, 1\)"),
    ],
)
def test_moments_of_another_split_are_refused(params, mu, nu, said, way):
    moments = state(mu)[1]._replace(nu=state(nu)[1].nu)
    with pytest.raises(OptimizerError, match=f"split unlike each other: {said}"):
        WAYS[way](released(), (state(params)[0], moments))


def test_split_and_joined_mend_what_is_split_unlike():
    step, whole = released(), released().init(tiny_lm.parameters(np.float32, layers=LAYERS))
    whole = jax.tree.map(np.asarray, whole)
    for mend in (lambda state: step.split(state, 2), step.joined):
        mended = mend((state(2)[0], state(3)[1]))
        called(step, mended)
        jax.tree.map(np.testing.assert_array_equal, step.joined(mended), whole)


@pytest.mark.parametrize(("params", "moments"), [(0, LAYERS), (LAYERS, 0)])
def test_parameters_or_moments_alone_may_lie_in_host_memory(params, moments):
    step, batch = released(), tiny_lm.tokens(4).astype(jnp.int32)
    want, _ = jax.jit(step)(state(LAYERS), batch)
    got, _ = jax.jit(step)((state(params)[0], state(moments)[1]), batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), step.joined(got), want
    )


SHORT = r"`state\[1\].nu\['blocks'\]\['down'\]` has shape \(2, 16, 8\)"


@pytest.mark.parametrize("way", WAYS)
@refused(
    OptimizerError,
    (lambda p, m: p, "`state` is dict; expected the pair"),
    (lambda p, m: (p, (m,)), r"`state\[1\]` is tuple; expected AdamAState"),
    (lambda p, m: (p, state(2, 6)[1]), r"\.mu\['blocks'\].* has .*\(6, 16, 8\); .*\(4, 16, 8\)"),
    (lambda p, m: (p, state(2, width=16)[1]), r"\.mu\['blocks'\].* has shape \(4, 32, 16\)"),
    (lambda p, m: (p, m._replace(nu=m.nu | {"blocks": m.nu["blocks"].parts[0]})), SHORT),
    (lambda p, m: (p, m._replace(mu={"blocks": m.mu["blocks"]})), r"\.mu` has \['blocks'\].*'up'"),
    (lambda p, m: (p, m._replace(nu=m.nu | {"blocks": uneven(m.nu["blocks"])})), "disagree"),
)
def test_moments_of_another_model_are_refused(change, way):
    WAYS[way](released(), change(*state(2)))


def uneven(layers):
    first, second = layers.parts
    return Stacks((first, second | {"up": second["up"][:1]}))


@pytest.mark.parametrize(
    ("width", "devices", "said"),
    [(15, 7, "expected 6 devices"), (8, 32, "expected 16 devices"), (12, 5, "expected 4 devices")],
)
@pytest.mark.parametrize("divided", ["moments", "states"])
def test_devices_that_cannot_divide_the_layers_are_refused(width, devices, said, divided):
    step = released(axis_name="data")
    params = tiny_lm.parameters(np.float32, width=width)
    with pytest.raises(OptimizerError, match=rf"{devices} devices divide none .* {said}"):
        step.specs(params, devices, divided)
    fewer = int(said.split()[1])
    assert any(step.specs(params, fewer, divided)[1].mu["blocks"]["down"])
    step.specs(params, devices, "nothing")
    # A small array may stay whole.
    params["blocks"]["bias"] = jnp.ones((tiny_lm.LAYERS, 13))
    assert not any(step.specs(params, fewer, divided)[1].mu["blocks"]["bias"])


def test_states_that_the_machine_cannot_hold_are_refused(monkeypatch):
    """On a CPU both memories are one: what lies there needs no more, and what is created does."""
    step, params = released(), tiny_lm.parameters(np.float32, layers=LAYERS)
    layers = 3 * sum(a.nbytes for a in jax.tree.leaves(params["blocks"]))
    layer, outer = apart(params)
    monkeypatch.setattr(room, "free_host_bytes", lambda: layers)
    step.create(outer, layer, LAYERS, 1)
    monkeypatch.setattr(room, "free_host_bytes", lambda: layers - 1)
    for persist in (0, 1, LAYERS):
        with pytest.raises(TargetError, match=r"12.0 KiB more of states .* expected 12.0 KiB: lea"):
            step.create(outer, layer, LAYERS, persist)
    monkeypatch.setattr(room, "free_host_bytes", lambda: 0)
    split = step.split(step.init(params), 1)
    # On a GPU what is there already needs no more.
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(room, "device_of", lambda _: gpu)
    monkeypatch.setattr(support, "installed", lambda _: "0.11.1")
    with pytest.raises(TargetError, match=r"3.0 KiB more of states .* and 0 .* are free"):
        step.split(split, 0)
    jax.block_until_ready(step.split(step.split(split, 1), 3))


@pytest.mark.parametrize("way", ["call", "split", "joined"])
def test_the_state_of_another_transformation_or_model_is_refused(way):
    params = tiny_lm.parameters(np.float32, layers=LAYERS)
    step = tiny_lm.released(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(OptimizerError, match="the optimizer's state is .* expected"):
        WAYS[way](step, (params, optax.adagrad(0.1).init(params)))
    narrow = tiny_lm.parameters(np.float32, layers=LAYERS, width=4)
    with pytest.raises(OptimizerError, match=r"`state\[1\].* has shape .*; expected"):
        WAYS[way](step, (params, step.init(narrow)[1]))


@pytest.mark.parametrize(
    "step",
    [released(axis_name="data"), tiny_lm.released(optax.lion(0.01), axis_name="data")],
    ids=["adama", "lion"],
)
@pytest.mark.parametrize("how", [{"persist": 0, "copies": 2}, {"persist": 1, "copies": 3}])
def test_moments_are_divided_as_the_masters_of_copies(step, how):
    state = step.split(step.init(tiny_lm.parameters(np.float32, layers=LAYERS)), **how)
    new, _ = called(step.data_parallel(meshes.abstract(2), "states"), state)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_numpy_arrays_and_numpy_numbers_are_taken():
    params = jax.tree.map(np.asarray, tiny_lm.parameters(np.float32, layers=LAYERS))
    params, _ = released().split(released().init(params), np.int64(1))
    assert [p["up"].shape[0] for p in params["blocks"].parts] == [1, 3]


def one_number(i):
    return {"w": i * 1.0}


@refused(
    OptimizerError,
    ([1.0], one_number, 2, "`outer` is list and `layer` function; expected a dict"),
    ({"blocks": 1.0}, one_number, 2, r"`outer` is \['blocks'\] .* without 'blocks'"),
    ({"a": 1.0}, None, 2, "`layer` NoneType; expected .* a function"),
    ({"a": 1.0}, one_number, 0, "`count` is 0; expected .* at least 1"),
    ({"a": 1.0}, one_number, 2.0, "`count` is 2.0; expected"),
    ({"a": 1.0}, lambda i: {"n": i}, 2, r"`params\['blocks'\]\['n'\]` is int32"),
)
def test_what_cannot_be_created_says_what_is_expected(outer, layer, count):
    released().create(outer, layer, count)


GPU: Any = types.SimpleNamespace(platform="gpu")  # as JAX names its platform
CPU: Any = types.SimpleNamespace(platform="cpu")


def test_a_gpu_wants_a_jaxlib_and_a_pool_that_hold_the_states(monkeypatch):
    monkeypatch.setattr(support, "installed", lambda _: "0.11.1")
    room.check_pool(GPU, 64 * 2**30)
    room.check_pool(CPU, 2**50)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "60")
    with pytest.raises(TargetError, match=r"60.5 GiB of states.*XLA's pool .* at least 61 when"):
        room.check_pool(GPU, 65 * 10**9)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    room.check_pool(GPU, 199 * 2**30)
    monkeypatch.setattr(support, "installed", lambda _: "0.10.2")
    room.check_pool(GPU, 0)
    with pytest.raises(TargetError, match="jaxlib 0.10.2 reads .* 0.11.1 or later"):
        room.check_pool(GPU, 1)


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
    _, outer = apart(parameters())
    with pytest.raises(OptimizerError, match="`layer` returned no array; expected the parameters"):
        step.create(outer, lambda i: {}, 3)


def test_arrays_that_are_traced_are_not_moved(step):
    state, (layer, outer) = step.init(parameters()), apart(parameters())
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
    # The norm of a complex gradient counts its real and its imaginary parts.
    step, state = complex_step(("component", 1e-3), where)
    _, metrics = step(state, jnp.ones((2, 4)))
    assert float(metrics["grad_norm"]) > 1e-3
