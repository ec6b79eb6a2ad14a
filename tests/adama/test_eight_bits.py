"""Moments in 8 bits: the error of the code, training with them, and the steps that store them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem._optim.adama.eight_bits import EightBits, decoded, noise_of
from jaxmem.errors import OptimizerError
from tests.shared.compare import close

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]
LEAST = {True: 1.8e-5, False: 2.7e-10}  # of the row's largest


def values(signed: bool, seed: int, octaves: float, length: int = 300, dtype=np.float32):
    """Values over many octaves, with zeros, in rows of very different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, length)) * 2.0 ** rng.uniform(-octaves, 0, (4, length))
    x = np.where(rng.random(x.shape) < 0.1, 0, x) * np.array([[1], [1e-20], [1e20], [0]])
    return (x if signed else np.abs(x)).astype(dtype)


@pytest.mark.parametrize("signed", [True, False])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**30), octaves=st.floats(0, 40), length=st.sampled_from([1, 7, 300]))
def test_the_error_is_bounded(signed, seed, octaves, length):
    x = values(signed, seed, octaves, length)
    stored = EightBits.of(x, signed, noise_of(x.shape, seed, 3))
    largest = np.abs(x).max(1, keepdims=True)
    error = np.abs(np.asarray(stored.decoded, np.float64) - x)
    assert (error <= (np.abs(x) + LEAST[signed] * largest) / 8 * (1 + 1e-5)).all()
    assert stored.codes.dtype == (jnp.int8 if signed else jnp.uint8)
    if not signed:
        assert (np.asarray(stored.codes)[x > 0] > 0).all(), "an update divides by its root"


@pytest.mark.parametrize("signed", [True, False])
def test_the_worst_case_comes_near_the_bound(signed):
    """Just above a power of two, codes have a distance of an eighth."""
    x = np.array([[0.125 * 1.001, 1.0]], np.float32)
    errors = [
        abs(
            float(EightBits.of(x, signed, jnp.full(x.shape, n, jnp.uint32)).decoded[0, 0]) - x[0, 0]
        )
        for n in (0, 2**32 - 1)
    ]
    assert 0.12 * x[0, 0] <= max(errors) <= x[0, 0] / 8


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_unbiased(signed):
    x = values(signed, 1, 12)
    count = 4000
    code = lambda i: EightBits.of(x, signed, noise_of(x.shape, i, 0)).decoded.astype(float)
    mean = jax.jit(lambda: jax.lax.map(code, jnp.arange(count), batch_size=100).mean(0))()
    largest = np.abs(x).max(1, keepdims=True).astype(float)
    step = (np.abs(x) + LEAST[signed] * largest) / 8
    # Six standard errors: the variance of a value between two codes is at most a quarter of a step.
    assert (np.abs(np.asarray(mean) - x) <= 6 * step / 2 / count**0.5).all()


def test_what_is_decoded_is_coded_alike_again():
    x = values(True, 5, 20)
    once = EightBits.of(x, True, noise_of(x.shape, 1, 0))
    again = once.replaced(once.decoded, noise_of(x.shape, 2, 0))
    np.testing.assert_array_equal(again.codes, once.codes)


def test_a_row_with_a_value_that_is_not_a_number_is_none():
    x = jnp.ones((2, 8)).at[0, 3].set(jnp.nan)
    got = np.isnan(EightBits.of(x, True, noise_of(x.shape, 1, 0)).decoded)
    assert got.all(1).tolist() == [True, False]


def test_random_bits_do_not_follow_position_or_number():
    bits = [np.asarray(noise_of((1 << 14,), n, i) >> 12) for n in range(4) for i in range(3)]
    assert np.abs(np.corrcoef(bits) - np.eye(len(bits))).max() < 0.04
    assert all(abs(b.mean() / 2**19 - 1) < 0.02 for b in bits)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(3e-3),
    "lion": lambda: optax.lion(3e-4),
    "chained": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(3e-3, 1e-3, 100))
    ),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
}


def regression():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (16, 64)) / 4,
        "down": jax.random.normal(keys[1], (64, 4)) / 8,
        "scale": jnp.ones(()),
    }
    x = jax.random.normal(keys[2], (128, 16))
    y = jnp.tanh(x @ jax.random.normal(keys[3], (16, 4)))
    loss = lambda p, x, y: ((p["scale"] * jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2).mean()
    return loss, params, (x, y)


def final_loss(tx, steps=150):
    loss, params, data = regression()

    @jax.jit
    def step(params, state):
        gradient = jax.grad(loss)(params, *data)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    first = loss(params, *data)
    for _ in range(steps):
        params, state = step(params, state)
    return float(loss(params, *data) / first), state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optax_optimizer_trains_as_with_float_moments(name):
    (want, _), (got, state) = (
        final_loss(tx) for tx in (OPTIMIZERS[name](), jaxmem.quantized(OPTIMIZERS[name]()))
    )
    assert want < 0.7
    assert got == pytest.approx(want, rel=0.05)
    arrays = [a for a in jax.tree.leaves(state) if a.size >= 64 * 4]
    assert arrays
    assert {a.dtype.itemsize for a in arrays} == {1}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("second_moment", ["squares", "row"])
def test_adama_trains_as_with_float_moments(n, second_moment):
    def make(moments):
        return jaxmem.adama(
            3e-3, accumulation_steps=n, second_moment=second_moment, moments=moments
        )

    (want, _), (got, state) = (final_loss(make(m), 150 * n) for m in ("float", "int8"))
    assert got == pytest.approx(want, rel=0.15)
    assert state.mu["up"].codes.dtype == jnp.int8
    assert state.nu["up"].codes.dtype == jnp.uint8
    assert state.mu["scale"].dtype == state.nu["scale"].dtype


def test_bfloat16_parameters_are_rounded_stochastically():
    """An update of a tenth of the distance between two bfloat16 numbers is not lost on average."""
    params = {"w": jnp.full((64, 64), 1.5, jnp.bfloat16), "n": jnp.ones(3)}
    rate = 0.1 * 2.0**-7
    tx = jaxmem.quantized(optax.sgd(rate, momentum=0.0))
    gradient = jax.tree.map(jnp.ones_like, params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(20):
        params, state = step(params, state)
    assert params["w"].dtype == jnp.bfloat16
    mean = params["w"].astype(jnp.float32).mean()
    # The standard error of the mean: 20 roundings of variance 0.09 units, over 64² values.
    assert mean == pytest.approx(1.5 - 20 * rate, abs=6 * (20 * 0.09) ** 0.5 * 2.0**-7 / 64)
    np.testing.assert_allclose(params["n"], 1 - 20 * rate, rtol=1e-6)


def test_decays_change_no_code():
    tx = jaxmem.scale_by_adama(0.9, 0.99, accumulation_steps=2, moments="int8")
    _, params, _ = regression()
    state = tx.fold(tx.begin(tx.init(params)), params)
    begun = tx.begin(state)
    np.testing.assert_array_equal(begun.mu["up"].codes, state.mu["up"].codes)
    close(decoded(begun.nu)["up"], 0.99 * decoded(state.nu)["up"], 1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jaxmem.quantized("adam"), "`tx` is str; expected an optax transformation"),
        (lambda: jaxmem.quantized(jaxmem.adama(0.1)), "is AdamA; .*moments='int8'"),
        (lambda: jaxmem.adama(0.1, moments="int4"), "`moments` is 'int4'; expected 'float'"),
        (lambda: jaxmem.adama(0.1, mu_dtype="bfloat16", moments="int8"), "expected one of them"),
    ],
)
def test_wrong_arguments_are_named(make, says):
    with pytest.raises(OptimizerError, match=says):
        make()
