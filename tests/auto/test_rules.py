"""`jaxmem.auto` decides what derivative rules of the model's own (`jax.custom_vjp`) save: a kernel
of whose result and row sums all are saved does not run again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import jaxmem
from jaxmem._core.actions import KEEP, OFFLOAD
from jaxmem._model.layer import block
from jaxmem._trace.jaxpr import equations
from jaxmem.plans import Assignment
from tests.auto.steps import layers_of, scanned, unrolled
from tests.shared.compare import nonzero

LAYERS, ROWS, WIDTH = 3, 16, 8


def attention_of(save):
    """An attention whose rule saves its result and the logarithms of its sums, through `save`."""

    @jax.custom_vjp
    def flash(q, k, v, allowed):
        return forward(q, k, v, allowed)[0]

    def forward(q, k, v, allowed):
        scores = jnp.where(allowed, q @ k.T, -1e9)
        sums = save(jax.nn.logsumexp(scores, -1))
        out = save(jnp.exp(scores - sums[:, None]) @ v)
        return out, (q, k, v, allowed, out, sums)

    def backward(saved, g):
        q, k, v, allowed, out, sums = saved
        weights = jnp.exp(jnp.where(allowed, q @ k.T, -1e9) - sums[:, None])
        scores = weights * (g @ v.T - (g * out).sum(-1, keepdims=True))
        return scores @ k, scores.T @ q, weights.T @ g, None

    flash.defvjp(lambda *x: forward(*x), backward)
    return flash


PLAIN, NAMED = attention_of(lambda x: x), attention_of(lambda x: checkpoint_name(x, "theirs"))
FORWARD, BACKWARD = 2, 5  # products of the attention


def layer(x, p, attention=PLAIN):
    allowed = jnp.tril(jnp.ones((ROWS, ROWS), bool))
    q, k, v = (x @ p[name] for name in "qkv")
    return x + jnp.tanh(attention(q, k, v, allowed) @ p["o"])


LOSSES = {
    "scanned": functools.partial(scanned, layer=layer),
    "unrolled": functools.partial(unrolled, layers=[layer] * LAYERS),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def made(seed, *shape):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.standard_normal(shape) / shape[-1] ** 0.5, jnp.float32)


PARAMS = {name: made(i, LAYERS, WIDTH, WIDTH) for i, name in enumerate("qkvo")}
X = made(9, ROWS, WIDTH)


def candidates(loss, *args):
    return layers_of(loss, *args)[0].candidates


def rule_of(loss):
    (rule,) = [c for c in candidates(loss, PARAMS, X) if c.kind == "exact"]
    return rule.name


def products(loss, plan) -> int:
    """Matrix products of a gradient, those of a scan's body once."""
    traced = jax.make_jaxpr(jax.grad(jaxmem.auto(loss, plan)))(PARAMS, X)
    return sum(e.primitive.name == "dot_general" for e in equations(traced.jaxpr))


@each_loss
def test_what_is_kept_of_a_rule_does_not_run_again(loss):
    """Its forward runs once a layer with all that it saves kept, and twice without."""
    tags = [c.name for c in candidates(loss, PARAMS, X)]
    every = dict.fromkeys(tags, KEEP)
    without = {n: c for n, c in every.items() if n != rule_of(loss)}
    alone = loss is LOSSES["unrolled"]
    times = LAYERS if alone else 1
    counts = [products(loss, Assignment({"auto": kept})) for kept in (every, without)]
    own = FORWARD + BACKWARD + 3 * 4  # each of the other four products has two in the backward
    # Where the first layer stands alone, nobody asks for the derivative of what it is given.
    assert counts[0] == times * own - (3 if alone else 0)
    assert counts[1] - counts[0] == times * FORWARD


@pytest.mark.quick("keep-scanned", "recompute-unrolled", "offload-scanned")
@each_loss
@pytest.mark.parametrize("choice", ["keep", "recompute", "offload"])
def test_gradients_are_the_models_own(loss, choice):
    kept = {} if choice == "recompute" else {rule_of(loss): KEEP if choice == "keep" else OFFLOAD}
    plan = Assignment({"auto": kept})
    want = jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, X)
    got = jax.jit(jax.grad(jaxmem.auto(loss, plan), argnums=(0, 1)))(PARAMS, X)
    nonzero(got, want, 1e-5, 1e-7)
    np.testing.assert_allclose(jaxmem.auto(loss, plan)(PARAMS, X), loss(PARAMS, X), rtol=1e-6)


def test_it_is_called_after_the_function_whose_it_is():
    jitted = functools.partial(layer, attention=jax.jit(PLAIN))
    assert rule_of(functools.partial(scanned, layer=jitted)) == "flash"
    assert rule_of(LOSSES["scanned"]) == "rule", "nothing has a name"


def test_what_its_author_named_is_left_to_these_names():
    loss = functools.partial(scanned, layer=functools.partial(layer, attention=NAMED))
    assert "exact" not in [c.kind for c in candidates(loss, PARAMS, X)]
    kept = Assignment({"auto": {"theirs": KEEP}})
    assert products(loss, Assignment.nothing()) - products(loss, kept) >= FORWARD


def test_a_rule_that_saves_its_operands_alone_has_nothing_to_decide():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    of = lambda x, p: x + jnp.tanh(product(x, p["q"]))
    found = candidates(functools.partial(scanned, layer=of), {"q": PARAMS["q"]}, X)
    assert [c.kind for c in found] == ["residual", "linear"]


def test_one_whose_result_is_not_saved_keeps_what_it_saves():
    """A loss by rows, say: its result is a number a row, and the products are what it saves."""

    @jax.custom_vjp
    def sums(x, w):
        return jnp.tanh(x @ w).sum(-1)

    def forward(x, w):
        y = jnp.tanh(x @ w)
        return y.sum(-1), (x, w, y > 0, y)

    def backward(saved, g):
        x, w, positive, y = saved
        inner = jnp.where(positive, 1 - y * y, 1 - jnp.abs(y) ** 2) * g[:, None]
        return inner @ w.T, x.T @ inner

    sums.defvjp(forward, backward)
    of = lambda x, p: x + sums(x, p["q"])[:, None] * p["o"][0]
    loss = functools.partial(scanned, layer=of)
    params = {name: PARAMS[name] for name in "qo"}
    (name,) = [c.name for c in candidates(loss, params, X) if c.kind == "exact"]
    want = jax.grad(loss)(params, X)
    got = jax.grad(jaxmem.auto(loss, Assignment({"auto": {name: KEEP}})))(params, X)
    nonzero(got, want, 1e-5)


def test_a_rule_that_asks_which_operands_have_a_derivative_is_left_alone():
    """It refuses one of its bias, which has none here."""

    @jax.custom_vjp
    def dense(x, w, b):
        return jnp.tanh(x @ w + b)

    def forward(x, w, b):
        if b.perturbed:
            raise ValueError("the rule has no gradient of a bias")
        y = dense(x.value, w.value, b.value)
        return y, (x.value, w.value, y)

    def backward(saved, g):
        x, w, y = saved
        inner = g * (1 - y * y)
        return inner @ w.T, x.T @ inner, jnp.zeros_like(y)

    dense.defvjp(forward, backward, symbolic_zeros=True)
    of = lambda x, p: x + dense(x @ p["q"], p["k"], jnp.full((ROWS, WIDTH), 0.3)) @ p["o"]
    loss = functools.partial(scanned, layer=of)
    params = {name: PARAMS[name] for name in "qko"}
    want = jax.grad(loss)(params, X)
    got = jax.grad(jaxmem.auto(loss, Assignment.nothing()))(params, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 0
        # Of a sum that nearly vanishes the rounding of its largest terms is left.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(np.abs(b).max()))


def mapped_in(checked: bool):
    """A loss whose attention is inside a `jax.shard_map`, as those that XLA does not divide are."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()
    own = lambda *x: PLAIN(*x) * jax.lax.axis_size("data")
    attention = jax.shard_map(own, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=checked)
    return functools.partial(scanned, layer=functools.partial(layer, attention=attention))


@pytest.mark.quick("True")
@pytest.mark.parametrize("checked", [True, False])
def test_what_is_kept_of_a_rule_inside_a_shard_map_does_not_run_again(checked):
    loss = mapped_in(checked)
    name = rule_of(loss)
    every = dict.fromkeys([c.name for c in candidates(loss, PARAMS, X)], KEEP)
    without = {n: c for n, c in every.items() if n != name}
    counts = [products(loss, Assignment({"auto": kept})) for kept in (every, without)]
    assert counts == [FORWARD + BACKWARD + 12, FORWARD + BACKWARD + 12 + FORWARD]
    want = jax.jit(jax.grad(loss))(PARAMS, X)
    for kept in (every, without, {name: OFFLOAD}, {}):
        plan = Assignment({"auto": kept})
        got = jax.jit(jax.grad(jaxmem.auto(loss, plan)))(PARAMS, X)
        nonzero(got, want, 1e-5, 1e-7)


@pytest.mark.parametrize("loss", [LOSSES["scanned"], mapped_in(False)], ids=["scan", "shard_map"])
def test_a_plan_keeps_what_a_rule_saves_together(loss):
    """Under one name: the sums are small, and without them the result is of no use."""

    def step(params, x):
        return jax.tree.map(lambda a, g: a - g, params, jax.grad(loss)(params, x))

    plan = jaxmem.plan(jaxmem.auto(step), PARAMS, X, budget="1GiB", target="local")
    (row,) = [r for r in plan.rows if r.tag == rule_of(loss)]
    assert row.bytes_before == 4 * ROWS * (WIDTH + 1), "its result, and its sums"


def test_what_the_derivative_reads_is_asked_once_for_equal_layers(monkeypatch):
    """And for each layer with another operation."""
    asked = []
    own = block._read_by_the_derivative
    monkeypatch.setattr(block, "_read_by_the_derivative", lambda g: asked.append(g) or own(g))
    monkeypatch.setattr(block, "_KNOWN", {})
    every = [candidates(LOSSES["scanned"], PARAMS, X) for _ in range(3)]
    assert every[0] == every[1] == every[2]
    assert len(asked) == 1
    for axis in (0, 1):  # of as many values, and the same operations before
        other = lambda x, p, a=axis: x + jax.nn.softmax(x @ p["q"], a) @ p["o"]
        candidates(functools.partial(scanned, layer=other), PARAMS, made(9, WIDTH, WIDTH))
    assert len(asked) == 3
