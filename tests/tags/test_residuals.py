"""What a backward reads: residuals held encoded, and residuals of a derivative rule that a plan
decides about. The value is `f`'s, the gradient is `f`'s at what was decoded, the bytes are the
codes'.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import codecs
from jaxmem._core.actions import Action, Choice
from jaxmem._cost.profile.options import codecs_for
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._trace.jaxpr import equations
from jaxmem.errors import TagError
from jaxmem.ops import compress_residuals, name_residuals
from jaxmem.plans import Assignment
from tests.shared.compare import close, nonzero
from tests.shared.refused import refused

INT4 = codecs.GroupedSymmetric(group=8)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A lossless codec: the bytes, as uint8."""

    name: ClassVar[str] = "bytes"

    def check(self, shape, dtype):
        pass

    def encode(self, x):
        return (jax.lax.bitcast_convert_type(x, jnp.uint8),)

    def decode(self, codes, shape, dtype):
        return jax.lax.bitcast_convert_type(codes[0], dtype)

    def nbytes(self, shape, dtype):
        return int(np.prod(shape)) * jnp.dtype(dtype).itemsize


LOSSLESS = lambda aval: None if aval.dtype == jnp.bool_ else Bytes()


def layer(p, x, key, rate=0.1):
    """p["w"] (D, D), x (T, D): a product, an activation, dropout."""
    mask = jax.random.bernoulli(key["dropout"], 1 - rate, x.shape)
    return jnp.where(mask, jnp.sin(x @ p["w"]), jnp.zeros((), x.dtype))


def arguments(dtype=jnp.float64, tokens=16, width=32):
    p = {
        "w": jax.random.normal(jax.random.key(1), (width, width), dtype)
        / jnp.asarray(width**0.5, dtype)
    }
    x = jax.random.normal(jax.random.key(2), (tokens, width), dtype)
    return p, x, {"dropout": jax.random.key(3), "layer": 0}


def squares(f):
    return lambda p, x, key: (f(p, x, key) ** 2).sum()


def held(f, *args):
    """(shape, dtype) of each array that f's backward keeps, for floating arguments."""
    return [
        (a.shape, a.dtype.name)
        for a in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *args))
    ]


def plain(f):
    return lambda p, x, key: jax.value_and_grad(squares(f), (0, 1))(p, x, key)


def gradients(loss):
    return lambda p, x, key: jax.jit(jax.value_and_grad(lambda p, x: loss(p, x, key), (0, 1)))(p, x)


def jitted(f):
    return gradients(squares(f))


def vmapped(f):
    def loss(p, x, key):
        keys = jax.random.split(key["dropout"], 3)
        return jax.vmap(lambda x, k: squares(f)(p, x, {"dropout": k}))(
            jnp.stack([x, 2 * x, 3 * x]), keys
        ).sum()

    return gradients(loss)


def per_example(f):
    grad = lambda p, x, k: jax.value_and_grad(squares(f), (0, 1))(p, x, {"dropout": k})
    batched = jax.jit(jax.vmap(grad, (None, 0, 0)))
    return lambda p, x, key: batched(p, jnp.stack([x, 2 * x]), jax.random.split(key["dropout"], 2))


def scan_loss(f, key, layers=3):
    keys = jax.random.split(key["dropout"], layers)
    body = lambda x, one: (f(one[0], x, {"dropout": one[1]}), None)
    return lambda p, x: (
        jax.lax.scan(body, x, (jax.tree.map(lambda w: jnp.stack([w] * layers), p), keys))[0] ** 2
    ).sum()


def scanned(f):
    return gradients(lambda p, x, key: scan_loss(f, key)(p, x))


def checkpointed(f):
    return gradients(lambda p, x, key: jax.checkpoint(lambda p, x: squares(f)(p, x, key))(p, x))


@pytest.mark.parametrize(
    ("under", "keep_args"),
    [
        (plain, None),
        (jitted, ()),
        (scanned, (0,)),
        (vmapped, ()),
        (per_example, (0,)),
        (checkpointed, (0,)),
    ],
)
def test_a_lossless_codec_gives_the_exact_gradient(under, keep_args):
    args = arguments()
    close(
        under(compress_residuals(layer, LOSSLESS, keep_args=keep_args))(*args),
        under(layer)(*args),
        1e-13,
    )


def test_the_value_is_exact_under_a_lossy_codec_and_the_gradient_near(optimized):
    args = arguments(jnp.float32)
    f = compress_residuals(layer, INT4, keep_args=(0,))
    (value, grads), (want, exact) = jitted(f)(*args), jitted(layer)(*args)
    np.testing.assert_array_equal(f(*args), layer(*args))
    np.testing.assert_array_equal(value, want)
    for got, grad in zip(jax.tree.leaves(grads), jax.tree.leaves(exact)):
        assert 1e-4 < jnp.linalg.norm(got - grad) / jnp.linalg.norm(grad) < 0.2


def test_the_gradient_is_taken_at_what_was_decoded(optimized):
    x, w = (jax.random.normal(jax.random.key(i), (8, 32), jnp.float32) for i in range(2))
    f = compress_residuals(lambda x, w: (jnp.sin(x) * w).sum(), INT4)
    dx, dw = jax.grad(f, (0, 1))(x, w)
    decoded = lambda y: INT4.decode(INT4.encode(y), y.shape, y.dtype)
    np.testing.assert_array_equal(dw, decoded(jnp.sin(x)))
    np.testing.assert_array_equal(dx, decoded(jnp.cos(x)) * w)
    scale = np.repeat(np.asarray(INT4.encode(jnp.sin(x))[1], np.float32), 8).reshape(x.shape)
    error = np.abs(dw - jnp.sin(x))
    assert (error <= scale * np.where(jnp.sin(x) > 7.5 * scale, 1, 0.5) * (1 + 1e-5)).all()
    assert error.max() > scale.max() / 4


def test_a_dropout_mask_is_held_as_one_bit_a_value():
    _, x, key = arguments(jnp.float32)
    dropout = lambda x: jnp.where(
        jax.random.bernoulli(key["dropout"], 0.9, x.shape), x / 0.9, jnp.zeros((), x.dtype)
    )
    assert held(dropout, x).count((x.shape, "bool")) == 1
    for codec in (INT4, lambda aval: None):
        kept = held(compress_residuals(dropout, codec), x)
        assert not [a for a in kept if a[1] == "bool"]
        assert [
            shape for shape, dtype in kept if dtype == "uint8" and np.prod(shape) == x.size // 8
        ]
    masked = compress_residuals(
        lambda x, mask: x * mask.astype(x.dtype), lambda aval: codecs.BitMask()
    )
    mask = jax.random.bernoulli(key["dropout"], 0.9, x.shape)
    np.testing.assert_array_equal(
        jax.grad(lambda x: masked(x, mask).sum())(x), mask.astype(x.dtype)
    )


@jax.custom_vjp
def attention(q, k, v):
    """q, k, v (T, D), as an operation that owns its residuals: output and log-sum-exp, as flash
    attention's.
    """
    return _attention(q, k, v)[0]


def _attention(q, k, v):
    scores = q @ k.T
    lse = jax.nn.logsumexp(scores, -1)
    out = jnp.exp(scores - lse[:, None]) @ v
    return out, (q, k, v, out, lse)


def _attention_backward(residuals, g):
    q, k, v, out, lse = residuals
    probs = jnp.exp(q @ k.T - lse[:, None])
    ds = probs * (g @ v.T - (g * out).sum(-1, keepdims=True))
    return ds @ k, ds.T @ q, probs.T @ g


attention.defvjp(_attention, _attention_backward)


def test_attention_output_is_encoded_and_its_log_sum_exp_is_not(optimized):
    q, k, v = (jax.random.normal(jax.random.key(i), (64, 32), jnp.float32) for i in range(3))
    choose = lambda aval: codecs.GroupedSymmetric() if aval.shape == (64, 32) else None
    f = compress_residuals(attention, choose)
    kept = held(f, q, k, v)
    assert kept.count(((64, 32), "float32")) == 3, "q, k, v, being the arguments, and no output"
    assert kept.count(((64,), "float32")) == 1, "the log-sum-exp"
    assert {((32, 32), "uint8"), ((32,), "bfloat16")} <= set(kept), "the output's codes"
    loss = lambda f: lambda *a: (f(*a) ** 2).sum()
    grads, exact = (jax.jit(jax.grad(loss(h), (0, 1, 2)))(q, k, v) for h in (f, attention))
    np.testing.assert_array_equal(f(q, k, v), attention(q, k, v))
    np.testing.assert_array_equal(grads[2], exact[2])
    for got, grad in zip(grads[:2], exact[:2]):
        assert 0 < jnp.linalg.norm(got - grad) / jnp.linalg.norm(grad) < 0.2


def test_arguments_stay_as_they_are_and_are_held_once():
    p, x, key = arguments(jnp.float32)
    w = p["w"]
    product = lambda w, x: jnp.sin(x @ w)
    float32 = lambda keep: [
        s
        for s, d in held(compress_residuals(product, INT4, keep_args=keep), w, x)
        if d == "float32"
    ]
    assert sorted(float32(None)) == [x.shape, w.shape]
    assert float32((0,)) == [w.shape]
    assert float32((1,)) == [x.shape]
    assert float32(()) == []
    stacked = jax.eval_shape(
        lambda p, x: jax.vjp(scan_loss(compress_residuals(layer, INT4), key), p, x)[1], p, x
    )
    shapes = [a.shape for a in jax.tree.leaves(stacked) if a.dtype == jnp.float32]
    assert shapes.count((3, 32, 32)) == 1
    assert shapes.count((3, 16, 32)) == 1, (
        "what enters a layer; its mask, sine and cosine are codes"
    )


def test_what_the_backward_holds_twice_is_encoded_once():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(
        lambda x: (jnp.sin(x), (jnp.cos(x),) * 2), lambda res, g: ((res[0] + res[1]) / 2 * g,)
    )
    f = compress_residuals(sine, LOSSLESS)
    x = jnp.linspace(0, 1, 16, dtype=jnp.float64)
    assert held(f, x) == [((16, 8), "uint8")]
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), jnp.cos(x))


def test_integers_keys_static_values_and_keywords():
    p, x, key = arguments()

    def f(p, x, ids, *, key, power, how):
        assert how == "rows"
        assert isinstance(power, int)
        return (layer(p, x[ids], key) ** power).sum()

    ids = jnp.asarray([3, 0, 3])
    call = lambda f: lambda p, x, ids: f(p, x, ids, key=key, power=2, how="rows")
    g = compress_residuals(f, LOSSLESS)
    close(*(jax.jit(jax.grad(call(h), (0, 1)))(p, x, ids) for h in (g, f)), 1e-13)
    assert ((3, 1), "int32") in held(lambda p, x: call(g)(p, x, ids), p, x)


def test_what_f_closes_over_is_differentiated():
    p, x, _ = arguments()
    loss = lambda wrap: lambda w: (wrap(lambda x: jnp.sin(x @ w))(x) ** 2).sum()
    compress = lambda f: compress_residuals(f, LOSSLESS)
    want = jax.grad(loss(lambda f: f))(p["w"])
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        close(transform(loss(compress))(p["w"]), want, 1e-13)


@pytest.mark.jax_defaults
def test_bfloat16_without_strict_promotion(optimized):
    args = arguments(jnp.bfloat16)
    f = compress_residuals(layer, str(codecs.default_for("linear")), keep_args=(0,))
    value, grads = jitted(f)(*args)
    assert value == jax.jit(lambda: squares(layer)(*args))()
    assert all(g.dtype == jnp.bfloat16 and jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_second_derivative_is_refused():
    p, x, key = arguments()
    first = jax.grad(lambda x: squares(compress_residuals(layer, INT4))(p, x, key))
    with pytest.raises(TagError, match="differentiated twice"):
        jax.grad(lambda x: (first(x) ** 2).sum())(x)


def relu_sum(x):
    return jnp.where(x > 0, x, 0.0).sum()


@refused(
    TagError,
    (lambda f: compress_residuals(f, "grouped_symetric"), "nearest: grouped_symmetric"),
    (lambda f: compress_residuals(f, 4), "`codec` is 4"),
    (lambda f: compress_residuals(f, codecs.BitMask), "`codec` is <class"),
    (lambda f: compress_residuals(f, INT4, keep_args=0), "`keep_args` is 0"),
    (lambda f: compress_residuals(f, INT4, keep_args=("x",)), "`keep_args` is"),
    (lambda f: compress_residuals(f, INT4, keep_args=(1,))(jnp.ones(3)), "1 positional"),
    (lambda f: jax.grad(compress_residuals(relu_sum, lambda a: INT4))(jnp.ones(3)), "bool"),
)
def test_wrong_arguments(call):
    call(jnp.sin)


ROWS, WIDTH = 16, 8
Q, K, V = (jax.random.normal(jax.random.key(i), (ROWS, WIDTH), jnp.float32) for i in range(3))
FORWARD = 2  # products of the attention


def block(plan, call=None):
    call = call or name_residuals(attention, "attention")
    inside = lambda q, k, v: jnp.tanh(call(jnp.sin(q), jnp.sin(k), v))
    run = jax.checkpoint(inside, policy=jaxmem.remat_policy(plan))
    return lambda q, k, v: (run(q, k, v) ** 2).sum()


def products(plan, call=None) -> int:
    with todays_checkpoint():
        traced = jax.make_jaxpr(jax.grad(block(plan, call), argnums=(0, 1, 2)))(Q, K, V)
    return sum(e.primitive.name == "dot_general" for e in equations(traced.jaxpr))


def of(action: Action) -> Assignment:
    return Assignment({"block": {"attention": Choice(action)}})


def test_its_forward_does_not_run_again_where_they_are_kept():
    kept, recomputed = products(of(Action.KEEP)), products(of(Action.RECOMPUTE))
    assert recomputed - kept == FORWARD
    tagged = lambda q, k, v: jaxmem.tag(attention(q, k, v), "attention")
    assert products(of(Action.KEEP), tagged) == recomputed, "a tag behind it spares nothing"


@pytest.mark.parametrize("action", [Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD])
def test_gradients_are_those_of_the_function(action):
    own = lambda q, k, v: (jnp.tanh(attention(jnp.sin(q), jnp.sin(k), v)) ** 2).sum()
    want = jax.grad(own, argnums=(0, 1, 2))(Q, K, V)
    got = jax.jit(jax.grad(block(of(action)), argnums=(0, 1, 2)))(Q, K, V)
    nonzero(got, want, 1e-5, 1e-6)


def test_arguments_may_be_trees_and_whatever_is_no_array():
    scale = jnp.float32(0.5)  # closed over

    def f(tree, power, *, name):
        assert (power, name) == (2, "x")
        return {"y": jnp.exp(scale * tree["x"]) ** power, "n": tree["n"] + 1}

    named = name_residuals(f, "saved")
    tree = {"x": Q, "n": jnp.arange(3)}
    want, got = f(tree, 2, name="x"), named(tree, 2, name="x")
    jax.tree.map(np.testing.assert_array_equal, got, want)
    loss = lambda f: lambda x: f({"x": x, "n": tree["n"]}, 2, name="x")["y"].sum()
    np.testing.assert_allclose(jax.grad(loss(named))(Q), jax.grad(loss(f))(Q), rtol=1e-6)
    batched = jax.vmap(loss(named))(jnp.stack([Q, K]))
    np.testing.assert_allclose(batched, jax.vmap(loss(f))(jnp.stack([Q, K])), rtol=1e-6)


def test_a_planner_makes_no_codes_of_them():
    """Whatever codecs there are, unless they name the kind."""
    float32 = jnp.dtype(jnp.float32)
    assert codecs_for("exact", None, float32, None) == []
    assert codecs_for("exact", None, float32, "grouped_symmetric") == []
    assert codecs_for("exact", None, float32, {"exact": "grouped_symmetric"})
    for asked in (None, "grouped_symmetric"):
        assert [*map(str, codecs_for("exact", None, jnp.dtype(bool), asked))] == ["bit_mask()"]


def test_a_requested_bit_mask_is_for_masks_alone():
    """Other values are decoded to NaN. A tag's own codec is not questioned."""
    float32 = jnp.dtype(jnp.float32)
    for asked in ("bit_mask", ["bit_mask"], {"linear": "bit_mask"}):
        assert codecs_for("linear", None, float32, asked) == []
    (left,) = codecs_for("linear", None, float32, ["bit_mask", "grouped_symmetric"])
    assert left == codecs.GroupedSymmetric()
    for kind, own, dtype in (
        ("mask", None, float32),
        (None, None, jnp.dtype(bool)),
        ("linear", "bit_mask", float32),
    ):
        assert codecs_for(kind, own, dtype, ["bit_mask"]) == [codecs.BitMask()]


@pytest.mark.parametrize("makes", ["mask", "index", "key"])
def test_it_may_close_over_what_is_traced_and_not_floating(makes):
    """As a kernel that is made inside the layer closes over its mask."""

    def inner(x, call):
        made = {
            "mask": jnp.tril(jnp.ones((ROWS, WIDTH), bool)),
            "index": jnp.cumsum(jnp.ones(ROWS, jnp.int32)) - 1,
            "key": jax.random.fold_in(jax.random.key(0), jnp.int32(x[0, 0] > 0)),
        }[makes]

        def f(x):
            if makes == "mask":
                return jnp.where(made, jnp.tanh(x), 0.1 * x)
            if makes == "index":
                return jnp.tanh(x[made])
            return jnp.tanh(x) * jax.random.normal(made, x.shape, x.dtype)

        return call(f)(jnp.sin(x))

    def loss(x, call):
        return (jax.checkpoint(lambda x: inner(x, call))(x) ** 2).sum()

    got = jax.jit(jax.grad(lambda x: loss(x, lambda f: name_residuals(f, "n"))))(Q)
    want = jax.grad(lambda x: loss(x, lambda f: f))(Q)
    nonzero(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize("name", ["", "*", None, 3])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(TagError, match="name_residuals: `name` is"):
        name_residuals(attention, name)
