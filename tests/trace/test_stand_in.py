"""Stand-ins of programs that may fail on made-up numbers, and programs without calls of Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback, pallas
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jaxmem
from jaxmem._target.compile.timing import measure
from jaxmem._trace.export import export_flat
from jaxmem._trace.jaxpr import equations
from jaxmem._trace.job import Job
from jaxmem._trace.stand_in import MOST_TURNS, on_any_values
from jaxmem.errors import StepError

pytestmark = pytest.mark.todays_checkpoint  # pieces are traced under it

X = np.linspace(0.5, 1.5, 6).reshape(2, 3)


def refused(a):
    raise ValueError("made-up numbers")


def checked(y, check):
    """`y`, after a check in Python."""
    return y + jax.pure_callback(
        check, jax.ShapeDtypeStruct((), y.dtype), jax.lax.stop_gradient(y.sum())
    )


def halved(x, turns):
    """Halves x for a number of turns, in a loop that ends by its values."""
    return jax.lax.while_loop(
        lambda c: c[1] > 0.5**turns, lambda c: (c[0] / 2, c[1] / 2), (x, jnp.ones(()))
    )[0]


def nested(x, inner):
    """Calls of `inner` in a scan, in a conditional, in a jit and in a checkpoint."""

    def turn(carry, row):
        row = jax.lax.cond(row.sum() > 3.0, inner, lambda r: 2.0 * r, row)
        return carry + row.sum(), row * carry

    total, rows = jax.lax.scan(turn, 0.25, x, reverse=True)
    return jax.checkpoint(jax.jit(inner))(rows) + total


@pytest.mark.parametrize("turns", [1, 7, MOST_TURNS])
def test_a_loop_that_ends_in_time_has_its_results(turns):
    f = functools.partial(nested, inner=lambda x: halved(x, turns))
    (found,) = on_any_values(jax.make_jaxpr(f)(X), X)
    np.testing.assert_array_equal(found, f(X))


def test_a_batched_loop_that_ends_by_its_values_is_timed():
    batched = jax.vmap(lambda row: halved(row, 3 * row.sum()))
    assert len(measure(Job(batched, (jax.typeof(X),)))) >= 7


def test_a_loop_that_does_not_end_ends():
    endless = lambda x: jax.lax.while_loop(lambda a: (a == a).all(), lambda a: a + 1.0, x)
    (found,) = on_any_values(jax.make_jaxpr(endless)(X), X)
    np.testing.assert_array_equal(found, X + MOST_TURNS)
    assert len(measure(Job(lambda x: nested(x, endless), (jax.typeof(X),)))) >= 7


def test_a_choice_by_platform_stays():
    def kernel(x, out):
        out[...] = halved(x[...], 1)

    def f(x):
        on_tpu = pallas.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))  # not for CPUs
        return halved(jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=on_tpu), 1)

    assert len(measure(Job(f, (jax.typeof(X),)))) >= 7


def test_a_piece_calls_no_python():
    job = Job(lambda x: nested(x, lambda r: checked(r, refused)), (jax.typeof(X),))
    assert len(measure(job)) >= 7
    assert not any("callback" in e.primitive.name for e in equations(job.jaxpr.jaxpr))


def hidden(function):
    """`function` as a primitive of a library, whose jaxpr shows no call of Python. It has the
    gradient of the identity.
    """
    primitive = Primitive("solve")
    primitive.def_impl(function)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    ad.primitive_jvps[primitive] = lambda xs, tangents: (primitive.bind(*xs), *tangents)
    return primitive.bind


def test_a_piece_with_a_hidden_call_of_python_is_not_run():
    said = []

    def prints(x):
        jax.debug.callback(lambda a: said.append(a), x)
        return x

    def asks(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return io_callback(lambda a: said.append(a) or a, shape, x)

    for function in (prints, asks, lambda x: checked(x, refused)):
        piece = functools.partial(nested, inner=hidden(function))
        assert measure(Job(piece, (jax.typeof(X),))) == []
    assert said == []
    assert len(measure(Job(hidden(jnp.sin), (jax.typeof(X),)))) >= 7


def test_a_piece_that_xla_cannot_run_has_no_time():
    def absent(x):
        return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    assert measure(Job(absent, (jax.typeof(X),))) == []


def printed(x, scale):
    """Prints at every depth, and is differentiated."""

    def inner(r):
        jax.debug.print("{}", r[0])
        return jnp.sin(r)

    y, gradient = jax.value_and_grad(lambda a: nested(a * scale, inner).sum())(x)
    jax.debug.callback(lambda a: None, y)
    return gradient, y


def test_an_exported_step_calls_no_python():
    given = jax.device_put(X), 2.0
    traced = jax.jit(printed, donate_argnums=0).trace(*given)
    exported, donated = export_flat(traced, "cpu")
    assert donated == (0,)
    found = export.deserialize(bytearray(exported)).call(*given)
    for a, b in zip(found, printed(*given)):
        np.testing.assert_allclose(a, b, rtol=1e-14)


def test_a_hidden_call_of_python_is_named_in_the_error_for_an_absent_device():
    def asks(x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(StepError, match=r"calls Python .*cuda.*EQX_ON_ERROR=nan"):
        export_flat(jax.jit(hidden(asks)).trace(X), "cuda")


def test_results_of_python_are_zeros_in_an_exported_step():
    step = lambda x: nested(x, lambda r: checked(r, refused))
    exported, _ = export_flat(jax.jit(step).trace(X), "cpu")
    (found,) = export.deserialize(bytearray(exported)).call(X)
    np.testing.assert_allclose(found, nested(X, lambda r: r), rtol=1e-14)


def step(w, x, look):
    """A step of SGD whose layers call `look`."""

    def layer(h, w):
        y = jnp.tanh(h @ w)
        look(y)
        return h + y, None

    loss = lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).mean()
    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_a_step_that_prints_is_planned_for_an_absent_device(target):
    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((2048, 64), "f4")
    plain = jaxmem.auto(functools.partial(step, look=lambda y: None))
    prints = jaxmem.auto(functools.partial(step, look=lambda y: jax.debug.print("{}", y[0, 0])))
    plans = [jaxmem.plan(each, *shapes, target=target) for each in (plain, prints)]
    assert plans[0].baseline_bytes == plans[1].baseline_bytes
    told = [[note for note in plan.notes if "calls of Python at" in note] for plan in plans]
    assert not told[0]
    assert "test_stand_in.py" in told[1][0]


@pytest.mark.parametrize("hides", [False, True])
def test_checks_of_values_see_the_values_of_the_user_alone(hides, measured_times):
    seen = []

    def check(total):
        seen.append(np.asarray(total).item())
        return np.zeros((), np.asarray(total).dtype)

    look = lambda y: checked(y, check)
    look = hidden(look) if hides else look

    def layer(h, w):
        return jnp.tanh(look(h @ w)), None

    def step(w, x):
        loss = lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).mean()
        return w - 0.1 * jax.grad(loss)(w)

    w, x = jnp.full((4, 64, 64), 0.01, jnp.float32), jnp.full((512, 64), 0.5, jnp.float32)
    jaxmem.plan(jaxmem.auto(step), w, x)
    h, totals = x, []
    for each in w:
        totals.append(float((h @ each).sum()))
        h = jnp.tanh(h @ each)
    assert seen
    assert all(min(abs(one / total - 1) for total in totals) < 1e-3 for one in seen)
