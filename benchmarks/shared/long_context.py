"""A GPT of 96 layers over 32768 tokens, whose attention takes memory linear in the tokens."""

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.shared.steps import step_of

LAYERS, BATCH, TOKENS, WIDTH, HEADS, VOCAB = 96, 4, 32768, 512, 8, 8192
CHUNK = 128  # queries whose scores exist at the same time


def _norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _attention(q, k, v):
    """Causal attention of one sequence, by chunks of queries. The backward recomputes scores."""
    by_head = lambda x: x.reshape(-1, HEADS, WIDTH // HEADS)
    keys, values = by_head(k), by_head(v)
    scale, least = (jnp.full((), a, jnp.float32) for a in ((WIDTH // HEADS) ** -0.5, -1e30))

    @jax.checkpoint
    def of_chunk(one):
        first, q = one
        scores = jnp.einsum("qhd,khd->hqk", by_head(q), keys).astype(jnp.float32) * scale
        is_past = first + jnp.arange(CHUNK)[:, None] >= jnp.arange(TOKENS)
        probs = jax.nn.softmax(jnp.where(is_past, scores, least)).astype(q.dtype)
        return jnp.einsum("hqk,khd->qhd", probs, values).reshape(CHUNK, WIDTH)

    chunks = jnp.arange(0, TOKENS, CHUNK), q.reshape(-1, CHUNK, WIDTH)
    return jax.lax.map(of_chunk, chunks).reshape(TOKENS, WIDTH)


def _layer(p, x):
    x = jaxmem.tag(x, "in", kind="residual")
    n = _norm(x)
    q, k, v = (jaxmem.tag(n @ p[name], name, kind="qkv") for name in "qkv")
    read = jax.lax.map(lambda one: _attention(*one), (q, k, v))
    read = jaxmem.tag(read, "attention", kind="linear")
    x = jaxmem.tag(x + read @ p["o"], "mid", kind="residual")
    up = jaxmem.tag(_norm(x) @ p["up"], "up", kind="linear")
    return x + jax.nn.gelu(up) @ p["down"]


def build(plan):
    """A step of gradient descent. The head is a weighted mean, as small as a chunked loss."""

    def loss(params, tokens):
        x = params["embedding"][tokens].astype(jnp.bfloat16)
        x = jaxmem.stack(_layer, params["layers"], x, plan=plan, dtype=jnp.bfloat16)
        return (_norm(x).astype(jnp.float32) ** 2 * params["head"]).mean()

    return step_of(loss, 1e-3)


def arguments():
    """Returns the shapes of the parameters and of the tokens."""
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    square = {name: shaped(LAYERS, WIDTH, WIDTH) for name in "qkvo"}
    wide = {"up": shaped(LAYERS, WIDTH, 4 * WIDTH), "down": shaped(LAYERS, 4 * WIDTH, WIDTH)}
    params = {"layers": square | wide, "embedding": shaped(VOCAB, WIDTH), "head": shaped(WIDTH)}
    return params, jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
