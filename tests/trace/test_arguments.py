"""The predicted bytes of a step's arguments are XLA's, or less. The bytes of arguments that a step
holds twice, because they are not donated, are the compiled bytes, and a note names them.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem._trace.arguments import argument_bytes, divisors, shards_of
from jaxmem._trace.donation import held_twice, warn_of_copies
from jaxmem._trace.step import trace
from jaxmem.errors import JaxmemWarning
from tests.shared import models, tiny_lm

pytestmark = pytest.mark.jax_defaults
S, P = jax.ShapeDtypeStruct, PartitionSpec


def traced(step, *args):
    return trace(lambda _: step, None, args)[1]


def counted(step, *args) -> int:
    """XLA's own count on this CPU."""
    stage = trace(lambda _: step, None, args)[0]
    return stage.lower().compile().memory_analysis().argument_size_in_bytes


def sgd(params, batch, key, unused):
    noise = jax.random.normal(key, batch.shape)
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh((batch + noise) @ p["w"]) + p["b"]))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads)


SGD = (
    {"w": S((32, 16), jnp.float32), "b": S((16,), jnp.float32), "idle": S((7,), jnp.float32)},
    S((8, 32), jnp.float32),
    jax.eval_shape(lambda: jax.random.key(0)),
    S((1000,), jnp.float32),
)


@jax.jit
def inner(x, y):
    return x * 2, y * 3


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (sgd, SGD),
        (jax.jit(sgd), SGD),
        (lambda x, y: inner(x, y)[0], (S((64,), jnp.float32), S((640,), jnp.float32))),
        (lambda x: x, (S((64,), jnp.bfloat16),)),
        (lambda x: x.astype(jnp.float32), (S((1024,), jnp.int4),)),
        (lambda x: x.astype(jnp.float32), (S((1023,), jnp.uint4),)),
        (lambda x: x.astype(jnp.float32), (S((1024,), jnp.float8_e4m3fn),)),
        (lambda x: jnp.where(x, 1, 2), (S((1024,), jnp.bool_),)),
        (lambda x: x * 1j, (S((16,), jnp.complex64),)),
        (lambda x: x + 1, (S((), jnp.float32),)),
        (lambda x: x + 1, (S((0, 3), jnp.float32),)),
        (lambda x, y: y + 1, (np.ones((5, 5), np.float32), 3)),
        (lambda: jnp.zeros(3), ()),
    ],
)
def test_bytes_are_those_that_xla_counts(step, args):
    assert argument_bytes(traced(step, *args), args, 1) == counted(step, *args)


def test_a_scans_idle_carry_is_not_read():
    def step(x, idle):
        body = lambda c, _: ((c[0] * 2, c[1] + 1), None)
        return jax.lax.scan(body, (x, idle), None, length=3)[0][0]

    args = S((64,), jnp.float32), S((640,), jnp.float32)
    assert argument_bytes(traced(step, *args), args, 1) <= counted(step, *args)


def on_mesh(axes, *spec):
    """A sharding over four by two devices."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(axes, axes))
    return NamedSharding(mesh, P(*spec))


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_divided_arguments_count_a_devices_share(axes):
    place = lambda *spec: S((16, 8), jnp.float32, sharding=on_mesh(axes, *spec))
    args = place(("data", "model")), place("data"), place(None, "model"), place()
    step = traced(lambda *a: [x + 1 for x in a], *args)
    assert divisors(step, args)[:3] == [8, 4, 2]
    assert argument_bytes(step, args, 8) == 4 * (16 + 32 + 64) + 4 * 128


def test_an_argument_that_may_be_divided_counts_as_divided():
    args = S((16, 8), jnp.float32), np.ones(16, np.float32)
    step = traced(lambda x, y: (x + 1, y + 1), *args)
    assert divisors(step, args) == [None, None]
    assert argument_bytes(step, args, 8) == 64 + 8
    assert argument_bytes(step, args, 1) == 512 + 64


def test_arguments_that_a_step_flattens_in_its_own_way_may_be_divided():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    args = (S((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("data"))),)
    step = traced(lambda x: x + 1, *args)
    assert divisors(step, args) == [2]
    assert divisors(step, (*args, S((3,), jnp.float32))) == [None]
    assert divisors(step, (S((3,), jnp.float32),)) == [None]


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_block_is_divided_as_the_batch_is(axes):
    place = lambda *spec: S((16, 8), jnp.float32, sharding=on_mesh(axes, *spec))
    add = lambda x, y: (x + 1, y + 1)
    args = place(("data", "model")), place("data")
    assert shards_of(traced(add, *args), args, 8) == 4, "the first is donated: states"
    assert shards_of(traced(jax.jit(add), *args), args, 8) == 8
    assert shards_of(traced(add, *args), args, 1) == 1
    plain = S((16, 8), jnp.float32), S((16, 8), jnp.float32)
    assert shards_of(traced(add, *plain), plain, 8) == 1
    assert shards_of(traced(lambda: jnp.zeros(3)), (), 8) == 1


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_jit_says_how_arguments_are_divided(axes):
    of = functools.partial(on_mesh, axes)
    plain = S((16, 8), jnp.float32), S((16, 8), jnp.float32), S((16, 8), jnp.float32)
    add = lambda x, y, z: (x + 1, y + 1, z + 1)
    shardings = of(("data", "model")), of("data"), of()
    step = traced(jax.jit(add, in_shardings=shardings, donate_argnums=0), *plain)
    assert divisors(step, plain) == [8, 4, 1]
    assert shards_of(step, plain, 8) == 4, "the first is donated: states"
    assert argument_bytes(step, plain, 8) == 16 * 8 * 4 * (1 / 8 + 1 / 4 + 1)
    some = traced(jax.jit(add, in_shardings=(of("data"), None, None)), *plain)
    assert divisors(some, plain) == [4, None, None]
    assert divisors(traced(jax.jit(add), *plain), plain) == [None] * 3


def test_what_lies_in_host_memory_is_not_the_devices():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    device = NamedSharding(mesh, P(), memory_kind="device")
    args = S((64,), jnp.float32, sharding=host), S((16,), jnp.float32)
    step = traced(jax.jit(lambda x, y: (jax.device_put(x, device), y + 1)), *args)
    assert argument_bytes(step, args, 1) == 64


def state_and_step():
    step = tiny_lm.released(jaxmem.adama(1e-3, accumulation_steps=2))
    params = tiny_lm.parameters(jnp.float32, width=64, vocab=64)
    return step, step.init(params), tiny_lm.tokens(4)


def test_its_bytes_are_those_that_the_compile_shows():
    step, state, batch = state_and_step()
    total = lambda compiled: (
        (m := compiled.memory_analysis()).output_size_in_bytes - m.alias_size_in_bytes
    )
    kept, donated = jax.jit(step), jax.jit(step, donate_argnums=0)
    found = held_twice(kept.trace(state, batch))
    assert found.keys() == {"0"}
    assert held_twice(donated.trace(state, batch)) == {}
    difference = total(kept.lower(state, batch).compile()) - total(
        donated.lower(state, batch).compile()
    )
    assert found["0"] == pytest.approx(difference, rel=0.01)
    assert found["0"] >= 3 * sum(a.nbytes for a in jax.tree.leaves(state[0]))


def test_moments_alone_are_told_apart():
    apart = lambda params, moments, batch: state_and_step()[0]((params, moments), batch)
    _, (params, moments), batch = state_and_step()
    traced = jax.jit(apart, donate_argnums=0).trace(params, moments, batch)
    assert held_twice(traced) == {"1": sum(a.nbytes for a in jax.tree.leaves(moments))}


def test_plan_warns_of_a_step_that_is_jitted_without_donation():
    _, state, batch = state_and_step()

    def build(plan, **donated):
        return jax.jit(
            tiny_lm.released(jaxmem.adama(1e-3, accumulation_steps=2), plan=plan), **donated
        )

    ask = lambda build: jaxmem.plan(build, state, batch)
    with pytest.warns(JaxmemWarning, match="replaces .* of its argument 0 .*donate_argnums=0"):
        ask(build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(lambda plan: build(plan, donate_argnums=0))


def test_the_warning_names_keywords_and_leaves_out_scalars_that_look_like_results():
    def step(weights, rate, *, moments):
        return weights - rate * moments, 0.9 * moments, weights.sum()

    many = jnp.ones((64, 64), jnp.float32)
    traced = jax.jit(step).trace(many, jnp.float32(0.1), moments=many)
    assert held_twice(traced).keys() == {"0", "1", "moments"}
    with pytest.warns(JaxmemWarning) as caught:
        warn_of_copies(traced, (), "plan")
    (message,) = (str(w.message) for w in caught)
    assert "donate_argnums=0 and donate_argnames='moments'" in message
    assert "arguments 0, moments" in message


def test_what_is_no_result_is_not_held_twice():
    loss = models.scanned(None)
    traced = jax.jit(lambda p, x: loss(p, x)).trace(models.parameters(), models.batch())
    assert held_twice(traced) == {}
