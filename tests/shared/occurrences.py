"""Blocks with two tags of one name, or with tags inside loops of the block."""

import itertools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem._core.actions import RECOMPUTE, Choice
from tests.shared import models


def twins(x, p, key, tag=jaxmem.tag):
    """A submodule that is called twice, the second time on half of the sequence, and two adjacent
    tags of one name.
    """

    def mlp(x):
        up = tag(tag(models.norm(x), "ln") @ p["up"], "up")
        return x + tag(jnp.tanh(up) * up, "act") @ p["down"]

    x = mlp(tag(x, "in"))
    x = tag(tag(x, "in"), "in")
    half = mlp(jnp.sin(x[:, : x.shape[1] // 2]))
    return x + jnp.concatenate([half, half], 1)


def named_twins(x, p, key):
    """As `twins`, with `checkpoint_name` in place of tags."""
    return twins(x, p, key, checkpoint_name)


def recurrent(x, p, key):
    """A recurrence over the sequence: each iteration reads the last iteration's tagged state."""
    n = jaxmem.tag(models.norm(x), "ln")

    def step(h, row):
        h = jaxmem.tag(jnp.tanh(row @ p["a"] + h @ p["a"]), "h")
        return h, h

    _, hs = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.moveaxis(n, 1, 0))
    return x + jnp.moveaxis(hs, 0, 1)


def chunked(x, p, key):
    """An MLP over a quarter of the rows at a time."""
    n = jaxmem.tag(models.norm(x), "ln")

    def mlp(rows):
        up = jaxmem.tag(rows @ p["up"], "up")
        return jaxmem.tag(jnp.tanh(up) * up, "act") @ p["down"]

    return x + jax.lax.map(mlp, n.reshape(4, -1, n.shape[-1])).reshape(x.shape)


def checkpointed(x, p, key):
    """As `chunked`, with a checkpoint for each quarter."""
    n = jaxmem.tag(models.norm(x), "ln")
    mlp = jax.checkpoint(lambda r: jnp.sin(jaxmem.tag(jnp.sin(r @ p["up"]), "up")) @ p["down"])
    return x + jnp.sin(jax.lax.map(mlp, n.reshape(4, -1, n.shape[-1]))).reshape(x.shape)


def attention(x, p, key):
    """Attention over a quarter of the keys at a time, with a running maximum and sum."""
    n = jaxmem.tag(models.norm(x), "ln")
    q = jaxmem.tag(n @ p["a"], "q")

    def step(carry, k):
        top, total, mixed = carry
        scores = jaxmem.tag(jnp.einsum("bsd,btd->bst", q, k), "scores")
        new = jnp.maximum(top, jax.lax.stop_gradient(scores.max(-1)))
        probs = jaxmem.tag(jnp.exp(scores - new[..., None]), "probs")
        old = jnp.exp(top - new)
        mixed = mixed * old[..., None] + jnp.einsum("bst,btd->bsd", probs, k)
        return (new, total * old + probs.sum(-1), mixed), None

    keys = jnp.moveaxis(n.reshape(x.shape[0], 4, -1, x.shape[2]), 1, 0)
    row = jnp.zeros_like(x[..., 0])
    (_, total, mixed), _ = jax.lax.scan(step, (row - 1e30, row, jnp.zeros_like(x)), keys)
    return x + jnp.sin(jaxmem.tag(mixed / total[..., None], "out"))


def counted(x, p, key):
    """A loop with its own counter, which writes its results in place."""
    n = jaxmem.tag(models.norm(x), "ln")

    def step(i, out):
        rows = jax.lax.dynamic_slice_in_dim(n, i * 2, 2, 1)
        up = jaxmem.tag(jnp.sin(rows @ p["a"]), "up")
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.sin(up) @ p["a"], i * 2, 1)

    return x + jax.lax.fori_loop(0, x.shape[1] // 2, step, jnp.zeros_like(x))


def decaying(x, p, key):
    """A running mean without a derivative: no iteration's derivative reads an earlier iteration."""
    n = jaxmem.tag(models.norm(x @ p["a"]), "ln")

    def step(mean, row):
        mean = jaxmem.tag(mean * 0.5 + jax.lax.stop_gradient(row), "mean")
        return mean, jnp.sin(row * (mean + 1))

    _, rows = jax.lax.scan(step, jnp.zeros_like(n[:, 0]), jnp.moveaxis(n, 1, 0))
    return x + jnp.moveaxis(rows, 0, 1)


def nested(x, p, key):
    """A loop in a loop, with a tag on a value that is equal in every iteration."""
    n = jaxmem.tag(models.norm(x), "ln")

    def outer(carry, rows):
        w = jaxmem.tag(jnp.sin(p["a"] * (1 + key.astype(x.dtype))), "w")

        def inner(h, row):
            h = jaxmem.tag(jnp.tanh(jaxmem.tag(row @ w, "row") + h), "h")
            return h, jnp.sin(h)

        carry, hs = jax.lax.scan(inner, carry, rows)
        return carry, jaxmem.tag(hs, "hs") ** 2

    rows = n.reshape(4, 4, -1, n.shape[-1])
    _, hs = jax.lax.scan(outer, jnp.zeros_like(rows[0, 0]), rows)
    return x + hs.reshape(x.shape)


TWINS = (twins, named_twins)
LOOPS = (recurrent, chunked, checkpointed, attention, counted, decaying, nested)


def assignments(block) -> list[dict[str, Choice]]:
    """Returns every assignment of keep and recompute to the tags of a class, and for each other
    choice the assignment of this choice to all tags.

    block: the class, with prices.
    """
    names = list(dict.fromkeys(t.name for t in block.tags))
    of = {n: [o.choice for o in block.occurrences(n)[0].options] for n in names}
    subsets = itertools.product((False, True), repeat=len(names))
    kept = [{n: of[n][0] for n, keeps in zip(names, subset) if keeps} for subset in subsets]
    others = {c.action: c for choices in of.values() for c in choices[1:]}
    choice = lambda name, action: next((c for c in of[name] if c.action == action), RECOMPUTE)
    return kept + [{n: choice(n, action) for n in names} for action in others]
