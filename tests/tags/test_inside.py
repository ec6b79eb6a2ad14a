"""What a tagged block may hold: rules of a user's own, loops, complex and integer values, donated
arrays. Whatever becomes of its tags, it is the untagged function.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import Choice
from jaxmem._core.assignment import Assignment
from jaxmem.errors import TagError
from tests.shared.compare import close, farthest

INT4 = Choice("compress", "grouped_symmetric(group=64,scale=bfloat16)")
BITS = Choice("compress", "bit_mask()")
LOSSLESS = ("keep", "recompute", "offload")


@jax.custom_vjp
def steep(x):
    """A sine whose own rule calls it three times as steep as it is."""
    return jnp.sin(x)


steep.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (3 * jnp.cos(x) * t,))


def with_a_rule(tag, p, x):
    return tag(steep(tag(x @ p["w"], "real")), "real") @ p["v"] + p["b"]


def with_a_while_loop(tag, p, x):
    """Its number of turns depends on the data. Reverse mode takes no loop that it runs through."""
    still = jax.lax.stop_gradient(tag(x @ p["w"], "real"))
    more = lambda state: (state[0] < 20) & (jnp.abs(state[1]).sum() > 1)
    turn = lambda state: (state[0] + 1, state[1] * 0.7)
    count, rest = jax.lax.while_loop(more, turn, (0, still))
    y = tag(jnp.sin(x @ p["w"]), "real") * (1 + rest)
    return y @ p["v"] * count.astype(y.dtype) + p["b"]


def with_complex_values(tag, p, x):
    """Tagged ones, and others that only the block knows, in a loop too."""
    z = tag(jax.lax.complex(jnp.cos(x @ p["w"]), jnp.sin(x) * 0.5), "complex")
    z = jax.lax.scan(lambda z, _: (jnp.sin(z) * z, None), z, None, length=2)[0]
    spectrum = jnp.fft.fft(jnp.exp(z * 0.1) * z)
    y = tag(jnp.real(jnp.fft.ifft(spectrum * jnp.conj(spectrum))), "real")
    return jnp.tanh(y * 0.01) @ p["v"] + p["b"]


def with_integers(tag, p, x):
    """An integer tensor of two values, indices, and a table that they read."""
    up = tag(x @ p["w"], "real")
    positive = tag((up > 0).astype(jnp.int32), "integer")
    place = tag(jnp.argsort(up, -1), "places")
    picked = jnp.take_along_axis(jnp.sin(up), place, -1) + p["b"][positive]
    return tag(picked, "real") @ p["v"] + p["b"]


BLOCKS = (with_a_rule, with_a_while_loop, with_complex_values, with_integers)
each_block = pytest.mark.parametrize("block", BLOCKS)


def parameters():
    """Perturbed, so that no gradient is zero by symmetry."""
    rng = np.random.default_rng(3)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5)
    return {"w": make(16, 16), "v": make(16, 16), "b": 0.1 * make(16)}


X = jnp.asarray(np.random.default_rng(4).normal(size=(6, 16)))
untagged = lambda x, name: x


def layer(block, choices):
    """The block by itself, or tagged and under a checkpoint; choices None: everything kept."""
    if choices == "plain":
        return functools.partial(block, untagged)
    plan = None if choices is None else Assignment({"block": choices})
    return jax.checkpoint(functools.partial(block, jaxmem.tag), policy=jaxmem.remat_policy(plan))


def actions(action):
    return dict.fromkeys(("real", "complex", "integer", "places"), action)


def both(block, choices):
    """Value and gradients of a loss, those of x too."""
    loss = lambda p, x: (jnp.cos(layer(block, choices)(p, x)) ** 2).sum()
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(parameters(), X)


@functools.cache
def plain(block):
    value, gradients = both(block, "plain")
    assert all(np.abs(g).min() > 0 for g in jax.tree.leaves(gradients)), "this can fail everywhere"
    return value, gradients


@each_block
@pytest.mark.parametrize("choices", [*map(actions, LOSSLESS), None], ids=[*LOSSLESS, "everything"])
def test_value_and_gradient_are_those_of_the_untagged_block(block, choices):
    close(both(block, choices), plain(block))


@each_block
def test_compressed_the_value_is_exact_and_the_gradient_near(block):
    choices = {**actions("keep"), "real": INT4, "integer": BITS}
    (value, gradients), (wanted, exact) = both(block, choices), plain(block)
    close(value, wanted, 1e-14)
    for got, want in zip(*map(jax.tree.leaves, (gradients, exact)), strict=True):
        cosine = (got * want).sum() / jnp.linalg.norm(got) / jnp.linalg.norm(want)
        assert cosine > 0.9
    assert farthest(gradients, exact) > 1e-6, "codes are what the backward reads"


def test_bits_of_integers_lose_nothing():
    choices = {**actions("keep"), "integer": BITS}
    close(both(with_integers, choices), plain(with_integers))
    integer = jax.jit(lambda p, x: jax.vjp(layer(with_integers, choices), p, x)[1])
    bits = [a for a in jax.tree.leaves(jax.eval_shape(integer, parameters(), X)) if a.dtype == "u1"]
    assert sum(a.size for a in bits) == X.size // 8


def test_the_users_own_rule_is_what_is_applied():
    sine = lambda tag, p, x: jnp.sin(x @ p["w"]) @ p["v"] + p["b"]
    assert np.abs(plain(with_a_rule)[1][0]["w"] - plain(sine)[1][0]["w"]).min() > 1e-9


def forward_only(tag, p, x):
    """A while loop that forward mode runs through."""
    turn = lambda state: (state[0] + 1, tag(jnp.sin(state[1] @ p["v"]), "real") + x @ p["w"])
    return jax.lax.while_loop(lambda s: s[0] < 3, turn, (0, tag(x, "real")))[1] + p["b"]


# Forward mode does not apply a reverse rule.
@pytest.mark.quick("keep-with_a_while_loop", "recompute-forward_only", "recompute-with_integers")
@pytest.mark.parametrize("block", [b for b in BLOCKS if b is not with_a_rule] + [forward_only])
@pytest.mark.parametrize("action", ["keep", "recompute"])
def test_jvp(block, action):
    p, x = parameters(), X
    tangents = jax.tree.map(jnp.cos, p), jnp.cos(x)
    of = lambda choices: jax.jit(functools.partial(jax.jvp, layer(block, choices)))
    got, want = (of(choices)((p, x), tangents) for choices in (actions(action), "plain"))
    close(got, want)
    assert np.abs(want[1]).min() > 0


@pytest.mark.quick("keep-with_a_rule", "recompute-with_a_while_loop")
@each_block
@pytest.mark.parametrize("action", ["keep", "recompute"])
def test_vmap(block, action):
    """Of the block and of its gradients, over examples and over models."""
    p, xs = parameters(), jnp.stack([X, 0.5 * X, X[::-1]])
    ps = jax.tree.map(lambda a: jnp.stack([a, 0.7 * a, -a]), p)

    @functools.partial(jax.jit, static_argnums=0)
    def of(run, p, ps, xs):
        loss = lambda p, x: (jnp.cos(run(p, x)) ** 2).sum()
        mapped = lambda f: (jax.vmap(f, (None, 0))(p, xs), jax.vmap(f)(ps, xs))
        return (*mapped(run), *mapped(jax.grad(loss)))

    got, want = (of(layer(block, choices), p, ps, xs) for choices in (actions(action), "plain"))
    close(got, want, 1e-11)
    assert all(np.abs(g).min() > 0 for g in jax.tree.leaves(want[2:]))
    close(jax.tree.map(lambda a: a[0], want[2]), plain(block)[1][0], 1e-11)


def test_an_error_of_a_codec_names_the_tag():
    block = lambda x: jnp.sin(jaxmem.tag(jnp.sin(x), "flat")).sum()
    choice = Choice("compress", "outlier_separated()")
    policy = jaxmem.remat_policy(Assignment({"block": {"flat": choice}}))
    gradient = jax.grad(jax.checkpoint(block, policy=policy))
    large = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    said = (
        r"tag 'flat': outlier_separated: `x` has 2147483648 channels.*at most 2147483647.*grouped"
    )
    with pytest.raises(TagError, match=said):
        jax.eval_shape(gradient, large)
