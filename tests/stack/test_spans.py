"""Layers in spans: the gradients of layers that are all saved, the number of forward runs, and the
bytes.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, UNTAGGED, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._trace.jaxpr import equations
from tests.shared import models
from tests.shared.executed import runs

LAYERS, WIDTH = 7, 16
ACTIONS = ("keep", "recompute", "offload", "everything")


def choices(action):
    return {UNTAGGED: KEEP} if action == "everything" else models.actions(action)


def in_spans(action, span, layers=LAYERS):
    return Assignment({f"block[0:{layers}:{span}]": choices(action)})


def pair(p, x, scale, *, key):
    """A layer with a carry of two leaves, dropout by a layer's key, a shared scale, and an
    auxiliary output.
    """
    a, b = x["a"], x["b"]
    mid = models.block(a, p["first"], p["number"].astype(jnp.float32))
    drop = jax.random.bernoulli(key, 0.8, b.shape)
    up = jaxmem.tag(jnp.where(drop, b, jnp.zeros((), b.dtype)) @ p["second"], "side", kind="linear")
    b = b + jnp.tanh(up) * scale + mid.mean(-1, keepdims=True)
    return {"a": mid + b, "b": b}, (up * up).mean()


def arguments(layers=LAYERS):
    rng = np.random.default_rng(6)
    first = models.parameters(layers, WIDTH, jnp.float64)
    second = jnp.asarray(rng.standard_normal((layers, WIDTH, WIDTH)) / WIDTH**0.5)
    p = {"first": first, "second": second}
    x = {"a": models.batch(2, 8, WIDTH, jnp.float64), "b": models.batch(2, 8, WIDTH, jnp.float64)}
    return p, x, jnp.asarray(1.5)


def loss_of(plan, layers=LAYERS):
    def loss(p, x, scale):
        p = p | {"number": jnp.arange(layers)}
        key = jax.random.key(3)
        y, aux = jaxmem.stack(pair, p, x, scale, plan=plan, key=key, has_aux=True)
        weights = jnp.arange(1.0, layers + 1)
        return (y["a"] ** 2).mean() + (y["b"] ** 3).mean() + aux @ weights, aux

    return loss


def by_hand(p, x, scale, layers=LAYERS):
    """The loss in a Python loop, without jaxmem's loops and without checkpoints."""
    auxes = []
    for i in range(layers):
        own = jax.tree.map(lambda a, i=i: a[i], p) | {"number": jnp.asarray(i)}
        key = jax.random.fold_in(jax.random.key(3), i)
        x, aux = pair(own, x, scale, key=key)
        auxes.append(aux)
    aux = jnp.stack(auxes)
    return (x["a"] ** 2).mean() + (x["b"] ** 3).mean() + aux @ jnp.arange(1.0, layers + 1), aux


@functools.cache
def expected(layers=LAYERS):
    gradients = jax.jit(
        jax.value_and_grad(functools.partial(by_hand, layers=layers), (0, 1, 2), has_aux=True)
    )
    found = gradients(*arguments(layers))
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(found[1]))
    return found


def close(got, want):
    """Compares each leaf within the rounding of its largest element. Gradients here reach 10^6, so
    that elements in which they cancel have no digits that every CPU computes alike.
    """

    def one(g, w):
        np.testing.assert_allclose(g, w, rtol=0, atol=3e-14 * float(jnp.abs(w).max()))

    jax.tree.map(one, got, want)


def gradients(plan, layers=LAYERS):
    return jax.jit(jax.value_and_grad(loss_of(plan, layers), (0, 1, 2), has_aux=True))


@pytest.mark.quick("recompute-3", "everything-2")
@pytest.mark.parametrize("span", [2, 3, 4, 6])
@pytest.mark.parametrize("action", ACTIONS)
def test_gradients_are_those_of_layers_in_turn(action, span):
    """Seven layers: each number of layers of a span leaves a remainder."""
    close(gradients(in_spans(action, span))(*arguments()), expected())


@pytest.mark.quick("3")
@pytest.mark.parametrize("span", [2, 3])
def test_spans_that_divide_the_layers(span):
    close(gradients(in_spans("keep", span, 6), 6)(*arguments(6)), expected(6))


def test_codes_are_those_of_layers_that_are_all_saved():
    """A codec encodes the tensors of the second forward run, which repeats the first run."""
    whole = gradients(models.draft("compress"))(*arguments())
    close(gradients(in_spans("compress", 3))(*arguments()), whole)
    assert not np.allclose(whole[1][0]["second"], expected()[1][0]["second"], rtol=1e-6)


def test_two_groups_one_of_them_in_spans():
    plan = Assignment({"block[0:4:2]": choices("keep"), "block[4:7]": choices("recompute")})
    close(gradients(plan)(*arguments()), expected())


def test_folds_are_those_of_layers_that_are_all_saved():
    p, x, scale = arguments()
    moments = jax.tree.map(lambda a: (a, a * 0 + 2.0), p)

    def fold(moments, gradient):
        gradient = {name: gradient[name] for name in ("first", "second")}
        pair_of = lambda g, m: (0.5 * m[0] + g, m[1] + g * g)
        return jax.tree.map(pair_of, gradient, moments)

    def loss(moments):
        own = p | {"number": jnp.arange(LAYERS)}
        y, aux = jaxmem.stack(
            pair,
            own,
            x,
            scale,
            plan=in_spans("keep", 3),
            key=jax.random.key(3),
            has_aux=True,
            moments=moments,
            fold=fold,
        )
        return (y["a"] ** 2).mean() + (y["b"] ** 3).mean() + aux @ jnp.arange(1.0, LAYERS + 1)

    got = jax.jit(jax.grad(loss))(moments)
    want = jax.tree.map(lambda a, g: (0.5 * a + g, 2.0 + g * g), p, expected()[1][0])
    close(got, want)


def counted(p, x):
    """A layer whose forward has one sine, and whose backward has none."""
    return x + jaxmem.tag(jnp.sin(x), "s", kind="linear") * p


@pytest.mark.parametrize(
    ("span", "action", "times"),
    # 7 layers: a forward, another one of each layer of a whole span, and the policy's own.
    [(1, "keep", 7), (1, "recompute", 7 + 7), (3, "keep", 7 + 6), (3, "recompute", 7 + 6 + 7)],
)
def test_each_layer_of_a_span_runs_forward_once_more(span, action, times):
    label = "block" if span == 1 else f"block[0:{LAYERS}:{span}]"
    plan = Assignment({label: {"s": Choice(action)}})
    loss = lambda p, x: jnp.sum(jaxmem.stack(counted, p, x, plan=plan) ** 2)
    # The gradient of the parameter reads the sine, and the derivative of the sine is a cosine.
    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones(LAYERS), jnp.ones(3))
    assert runs(jaxpr.jaxpr, "sin") == times
    assert any(e.primitive.name == "cos" for e in equations(jaxpr.jaxpr))


@pytest.mark.parametrize("action", ["recompute", "keep"])
def test_bytes_fall_with_the_square_root_of_the_layers(action):
    layers, span = 36, 6
    weights, x = models.parameters(layers, 64, jnp.float32), models.batch(8, 32, 64)
    block = lambda p, x: models.narrow(x, p, None)

    def temporary(label):
        plan = Assignment({label: models.actions(action, ("up", "mask", "act"))})
        loss = lambda p, x: (jaxmem.stack(block, p, x, plan=plan) ** 2).mean()
        step = jax.jit(jax.grad(loss)).lower(weights, x).compile()
        return step.memory_analysis().temp_size_in_bytes

    one = x.nbytes  # of a layer's input
    of_layer = one if action == "recompute" else one + 2 * 2 * one + 2 * one // 4
    spared = layers * of_layer - (math.ceil(layers / span) * one + span * of_layer)
    difference = temporary("block") - temporary(f"block[0:{layers}:{span}]")
    assert abs(difference - spared) <= 0.1 * spared


WRONG = {
    "one layer": ("block[0:7:1]", "spans of 1 layers; expected spans of 2 to 6"),
    "all layers": ("block[0:7:7]", "spans of 7 layers; expected spans of 2 to 6"),
    "no layer": ("block[0:7:0]", "spans of 0 layers"),
    "other layers": ("block[0:8:2]", "there are 7 layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_spans(name):
    label, message = WRONG[name]
    with pytest.raises(jaxmem.errors.TagError, match=message):
        gradients(Assignment({label: {}}))(*arguments())


def test_a_policy_alone_runs_no_spans():
    plan = in_spans("keep", 3)
    with pytest.raises(
        jaxmem.errors.TagError, match=r"'block\[0:7:3\]', in spans of 3 layers, and only"
    ):
        jaxmem.remat_policy(plan, layer=(0, 7))
    with pytest.raises(jaxmem.errors.TagError, match="one policy cannot"):
        jaxmem.remat_policy(plan)


@pytest.mark.parametrize("which", ["params", "moments"])
def test_layers_in_host_memory_run_no_spans(which):
    on_host = lambda tree: jax.device_put(tree, jax.memory.Space.Host)
    p, x = {"w": jnp.ones((4, 2))}, jnp.ones((3, 2))
    fold = lambda m, g: jax.tree.map(jnp.add, m, g)
    plan = Assignment({"block[0:4:2]": {}})

    def loss(p, moments):
        y = jaxmem.stack(lambda p, x: x * p["w"], p, x, plan=plan, moments=moments, fold=fold)
        return (y * y).sum()

    given = {"params": p, "moments": jax.tree.map(jnp.zeros_like, p)}
    given[which] = on_host(given[which])
    with pytest.raises(jaxmem.errors.TagError, match="in spans of 2 layers.* in device memory"):
        jax.jit(jax.grad(loss, 1)).lower(*given.values())
