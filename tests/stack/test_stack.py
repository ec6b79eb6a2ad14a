"""stack(): the gradients of a scan over checkpointed layers, whatever the plan, the groups, and
what goes through them.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, UNTAGGED, Choice
from jaxmem._core.assignment import Assignment
from tests.shared import models
from tests.shared.marks import slow

ACTIONS = ("keep", "recompute", "offload", "compress")


def block(p, x):
    """A layer whose parameters are (weights, number): an integer that differs by layer, with no
    derivative.
    """
    weights, number = p
    return models.block(x, weights, number.astype(jnp.float32))


def mean_square(y):
    return (y * y).mean()


def parameters(layers):
    return models.parameters(layers, 16, jnp.float64), jnp.arange(layers)


def scan_loss(policy):
    """The reference: jax.lax.scan over jax.checkpoint."""
    layer = jax.checkpoint(block, policy=policy, prevent_cse=False)

    def loss(weights, numbers, x):
        return mean_square(jax.lax.scan(lambda x, p: (layer(p, x), None), x, (weights, numbers))[0])

    return loss


def stack_loss(plan):
    return lambda weights, numbers, x: mean_square(
        jaxmem.stack(block, (weights, numbers), x, plan=plan)
    )


@functools.cache
def scan_gradients(layers, action=None):
    """The reference's loss and gradients, whose plan need be the stack's only where it is lossy."""
    (weights, numbers), x = parameters(layers), models.batch(2, 8, 16, jnp.float64)
    plan = None if action is None else models.draft(action)
    loss = scan_loss(jaxmem.remat_policy(plan))
    return jax.jit(jax.value_and_grad(loss, (0, 2)))(weights, numbers, x)


def close(got, want, rtol=1e-12):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=1e-15), got, want)


def grouped(ends, actions):
    """A plan of groups [0:e0], [e0:e1] ... with an action each."""
    names = itertools.pairwise((0, *ends))
    return Assignment(
        {f"block[{a}:{b}]": models.actions(action) for (a, b), action in zip(names, actions)}
    )


@pytest.mark.parametrize("layers", [3, *(slow(n) for n in range(1, 25) if n != 3)])
@pytest.mark.parametrize("action", [None, *ACTIONS])
def test_gradients_are_those_of_a_scan(action, layers):
    plan = None if action is None else models.draft(action)
    (weights, numbers), x = parameters(layers), models.batch(2, 8, 16, jnp.float64)
    got = jax.jit(jax.value_and_grad(stack_loss(plan), (0, 2)))(weights, numbers, x)
    close(got, scan_gradients(layers, action if action == "compress" else None))


@pytest.mark.parametrize("ends", [pytest.param((1, 6), marks=pytest.mark.slow), (1, 2, 5, 6)])
def test_groups_give_the_gradients_of_layers_in_turn(ends):
    actions = ("compress", "recompute", "keep", "offload")[: len(ends)]
    (weights, numbers), x = parameters(6), models.batch(2, 8, 16, jnp.float64)

    def loop(weights, x):
        for part, action in ((slice(ends[0]), "compress"), (slice(ends[0], None), "recompute")):
            layer = jax.checkpoint(block, policy=jaxmem.remat_policy(models.draft(action)))
            own = jax.tree.map(lambda a, part=part: a[part], (weights, numbers))
            x, _ = jax.lax.scan(lambda x, p, layer=layer: (layer(p, x), None), x, own)
        return mean_square(x)

    want = jax.jit(jax.value_and_grad(loop, (0, 1)))(weights, x)
    got = jax.jit(jax.value_and_grad(stack_loss(grouped(ends, actions)), (0, 2)))(
        weights, numbers, x
    )
    close(got, want, 1e-11)


def test_forward_alone_saves_nothing_and_is_the_same():
    (weights, numbers), x = parameters(3), models.batch(2, 8, 16, jnp.float64)
    y = jax.jit(lambda x: jaxmem.stack(block, (weights, numbers), x, plan=models.draft("keep")))(x)
    want = jax.lax.scan(lambda x, p: (block(p, x), None), x, (weights, numbers))[0]
    close(y, want)
    assert jax.jit(stack_loss(models.draft("keep"))).trace(weights, numbers, x).jaxpr.jaxpr.eqns


@pytest.mark.standard_promotion
@pytest.mark.parametrize("action", ["everything", "keep"])
def test_a_layers_parameters_in_another_dtype_are_not_saved(action):
    plan = None if action == "everything" else models.draft("keep")
    weights, x = models.parameters(5, 16, jnp.float32), models.batch(2, 8, 16, jnp.bfloat16)
    numbers = jnp.arange(5, dtype=jnp.float32)
    low = lambda p, x: models.block(x, jax.tree.map(lambda w: w.astype(jnp.bfloat16), p[0]), p[1])
    loss = lambda w: mean_square(jaxmem.stack(low, (w, numbers), x, plan=plan))
    _, pull = jax.eval_shape(lambda w: jax.vjp(loss, w), weights)
    kinds = {(a.shape, a.dtype) for a in jax.tree.leaves(pull)}
    stacks = {a.shape for a in jax.tree.leaves(weights)}
    assert {dtype for shape, dtype in kinds if shape in stacks} <= {jnp.dtype("float32")}
    assert any(shape[:1] == (5,) and dtype == jnp.bfloat16 for shape, dtype in kinds), (
        "activations are"
    )


def dropping(p, x, mask, scale, *, key):
    """Dropout by a layer's key, a mask and a scale that layers share, and an auxiliary output."""
    drop = jaxmem.tag(jax.random.bernoulli(key, 0.8, x.shape), "mask", kind="mask")
    y = jaxmem.tag(jnp.tanh(x @ p["w"]), "y", kind="linear") * scale
    return x + jnp.where(drop & mask, y, jnp.zeros((), x.dtype)), (y * y).sum()


def dropped():
    """Parameters, input, mask, scale and key of a stack of `dropping`."""
    rng = np.random.default_rng(0)
    p = {"w": jnp.asarray(rng.standard_normal((4, 8, 8)) / 3)}
    x, mask = jnp.asarray(rng.standard_normal((3, 8))), jnp.asarray(rng.random(8) > 0.2)
    return p, x, mask, jnp.asarray(1.5), jax.random.key(3)


@functools.cache
def dropped_by_hand():
    """Loss, auxiliary outputs and gradients of its layers in a Python loop."""
    p, x, mask, scale, key = dropped()

    def loss(p, x, scale):
        auxes = []
        for i in range(4):
            x, aux = dropping({"w": p["w"][i]}, x, mask, scale, key=jax.random.fold_in(key, i))
            auxes.append(aux)
        aux = jnp.stack(auxes)
        return mean_square(x) + aux @ jnp.arange(1.0, 5.0), aux

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(p, x, scale)


@pytest.mark.parametrize("action", ["keep", "recompute", "everything"])
def test_keys_shared_arrays_and_auxiliary_outputs(action):
    every = action == "everything"
    choices = {UNTAGGED: KEEP} if every else dict.fromkeys(("mask", "y"), Choice(action))
    plan = Assignment({"block": choices})
    p, x, mask, scale, key = dropped()

    def mine(p, x, scale):
        y, aux = jaxmem.stack(dropping, p, x, mask, scale, plan=plan, key=key, has_aux=True)
        return mean_square(y) + aux @ jnp.arange(1.0, 5.0), aux

    got = jax.jit(jax.value_and_grad(mine, (0, 1, 2), has_aux=True))(p, x, scale)
    close(got, dropped_by_hand())


def test_what_a_block_closes_over_is_differentiated_too():
    (weights, numbers), x = parameters(3), models.batch(2, 8, 16, jnp.float64)

    def loss(shift, x):
        return mean_square(jaxmem.stack(lambda p, x: block(p, x) + shift, (weights, numbers), x))

    def plain(shift, x):
        return mean_square(
            jax.lax.scan(lambda x, p: (block(p, x) + shift, None), x, (weights, numbers))[0]
        )

    shift = jnp.linspace(0.0, 1.0, 16)
    close(jax.grad(jax.jit(loss), (0, 1))(shift, x), jax.jit(jax.grad(plain, (0, 1)))(shift, x))


@pytest.mark.parametrize("ends", [pytest.param((4,), marks=pytest.mark.slow), (1, 4)])
def test_a_fold_gathers_gradients_in_place_of_handing_them_out(ends):
    (weights, numbers), x = parameters(4), models.batch(2, 8, 16, jnp.float64)
    plan = grouped(ends, ("recompute", "keep"))
    moments = jax.tree.map(lambda a: (a, a * 0 + 2.0), weights)

    def fold(moments, gradient):
        g = gradient[0]
        return jax.tree.map(lambda g, m: (0.5 * m[0] + g, m[1] + g * g), g, moments)

    def loss(moments, x):
        y = jaxmem.stack(block, (weights, numbers), x, plan=plan, moments=moments, fold=fold)
        return mean_square(y)

    _, (gradient, want_x) = scan_gradients(4)
    want = jax.tree.map(lambda a, g: (0.5 * a + g, 2.0 + g * g), weights, gradient)
    got, d_x = jax.jit(jax.grad(loss, (0, 1)))(moments, x)
    close(got, want, 1e-11)
    close(d_x, want_x, 1e-11)


def test_accumulation_over_microbatches_carries_the_moments():
    (weights, numbers), x = parameters(3), models.batch(2, 8, 16, jnp.float64)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    fold = lambda m, g: jax.tree.map(jnp.add, m, g[0])

    def loss(moments, part):
        return mean_square(
            jaxmem.stack(block, (weights, numbers), part, moments=moments, fold=fold)
        )

    def step(x):
        return jax.lax.scan(
            lambda m, part: (jax.grad(loss)(m, part), None), zeros, x.reshape(2, 1, 8, 16)
        )[0]

    _, (of_the_mean, _) = scan_gradients(3)
    close(jax.jit(step)(x), jax.tree.map(lambda g: 2 * g, of_the_mean))


def test_layers_are_given_parameters_in_the_dtype_asked_for():
    seen = []

    def low(p, x):
        seen.append(p["w"].dtype)
        return x + (x.astype(jnp.bfloat16) @ p["w"]).astype(x.dtype)

    p, x = {"w": jnp.ones((3, 4, 4), jnp.float32) / 7}, jnp.ones((2, 4), jnp.float32)
    loss = lambda p, dtype: mean_square(jaxmem.stack(low, p, x, dtype=dtype))
    gradient = jax.grad(loss)(p, jnp.bfloat16)
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert gradient["w"].dtype == jnp.float32
    by_hand = lambda p: mean_square(
        jax.lax.scan(lambda x, w: (low({"w": w.astype(jnp.bfloat16)}, x), None), x, p["w"])[0]
    )
    close(gradient, jax.grad(by_hand)(p), 1e-6)


def test_the_derivative_of_a_derivative():
    (weights, numbers), x = parameters(2), models.batch(1, 4, 16, jnp.float64)
    inner = lambda loss: (
        lambda x: sum(map(jnp.sum, jax.tree.leaves(jax.grad(loss, 2)(weights, numbers, x))))
    )
    want = jax.jit(jax.grad(inner(scan_loss(jaxmem.remat_policy(None)))))(x)
    close(jax.jit(jax.grad(inner(stack_loss(None))))(x), want, 1e-9)


def test_vmap():
    (weights, numbers), x = parameters(2), models.batch(3, 4, 16, jnp.float64)
    loss = stack_loss(models.draft("recompute"))
    one = lambda x: jax.grad(loss, 2)(weights, numbers, x[None])[0]
    one_by_one = jax.jit(one)
    close(jax.jit(jax.vmap(one))(x), jnp.stack([one_by_one(a) for a in x]))


@pytest.mark.parametrize("action", ["keep", "recompute", "compress", None])
def test_a_layers_own_parameters_are_not_saved(action):
    plan = None if action is None else models.draft(action)
    (weights, numbers), x = parameters(3), models.batch(2, 8, 16, jnp.float64)
    jaxpr = jax.make_jaxpr(jax.grad(stack_loss(plan), (0, 2)))(weights, numbers, x)
    forward = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
    saved = {(v.aval.shape, v.aval.dtype) for v in forward.outvars if v.aval.shape[:1] == (3,)}
    assert saved.isdisjoint((a.shape, a.dtype) for a in jax.tree.leaves(weights))
    assert saved


def test_what_does_not_differ_by_layer_is_saved_once():
    def masked(p, x):
        return x + jnp.where(jnp.tril(jnp.ones((8, 8), bool)), x @ p["w"], jnp.zeros((), x.dtype))

    p, x = {"w": jnp.ones((3, 8, 8)) / 9}, jnp.ones((8, 8))
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: mean_square(jaxmem.stack(masked, p, x))))(p)
    forward = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
    assert not any(v.aval.dtype == bool for v in forward.outvars)


ADD = lambda m, g: m
TWO_DEPTHS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros((4, 2))}
WRONG = {
    "no array": ({"params": {}}, "`params` holds no array"),
    "scalar leaf": ({"params": {"w": jnp.zeros(())}}, r"`params\['w'\]` has shape \(\)"),
    "depths": ({"params": TWO_DEPTHS}, "holds 3 layers, and .* 4"),
    "integer x": ({"x": jnp.zeros(2, int)}, "`x` is int.*floating"),
    "fold alone": ({"fold": ADD}, "`fold` is given and `moments` is not"),
    "moments alone": ({"moments": TWO_DEPTHS}, "`moments` is given and `fold` is not"),
    "moments' depth": ({"moments": jnp.zeros((2, 2)), "fold": ADD}, "holds 2 layers, and .* 3"),
    "integer moments": ({"moments": jnp.zeros((3, 2), int), "fold": ADD}, "`moments` is int"),
    "shape": ({"block": lambda p, x: x[:1]}, r"returned `x` as float64\[1\], and got float64\[2\]"),
    "dtype": ({"block": lambda p, x: x.astype(jnp.float32)}, r"returned `x` as float32\[2\]"),
    "tree": ({"block": lambda p, x: (x, x)}, "has_aux=True"),
    "no pair": ({"block": lambda p, x: x, "has_aux": True}, "a pair"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    change, message = WRONG[name]
    given = {
        "block": lambda p, x: x * p["w"],
        "params": {"w": jnp.ones((3, 2))},
        "x": jnp.ones(2),
    } | change
    with pytest.raises(jaxmem.errors.StackError, match=f"(?s)stack: .*{message}"):
        jaxmem.stack(given.pop("block"), given.pop("params"), given.pop("x"), **given)


@pytest.mark.parametrize("ends", [(2,), (2, 4), (5,)])
def test_a_plan_of_other_layers(ends):
    (weights, numbers), x = parameters(3), models.batch(2, 8, 16, jnp.float64)
    with pytest.raises(jaxmem.errors.TagError, match="there are 3 layers"):
        stack_loss(grouped(ends, ("keep", "recompute")))(weights, numbers, x)
