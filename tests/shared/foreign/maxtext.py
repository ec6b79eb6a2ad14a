"""A decoder in MaxText's form. Its layer has its own checkpoint, and names tensors by
`checkpoint_name`. Its attention divides by the softmax's sums after the product with the values.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tests.shared.foreign.plain import in_a_scan
from tests.shared.foreign.size import SMALL, Size

NAMES = (
    "decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj",
    "mlpwi_0", "mlpwi_1", "mlpwo",
)  # fmt: skip


def norm(x, scale):
    wide = x.astype(jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    # An einsum without a sum, as in Flax's norms.
    return jnp.einsum("...k,k->...k", normed.astype(x.dtype), scale.astype(x.dtype))


def rotated(x):
    """Rotary embedding: a sum of two products, so that the projection is read twice."""
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None, None] / (1 + jnp.arange(x.shape[-1]))
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def attention(query, key, value):
    """Dot-product attention of (batch, sequence, heads, width), with the normalization last."""
    scores = jnp.einsum("btkgd,bskd->bkgts", query[:, :, :, None], key)
    causal = jnp.tril(jnp.ones((query.shape[1],) * 2, bool))
    scores = jnp.where(causal, scores, jnp.asarray(-1e9, scores.dtype))
    logits = scores.reshape(scores.shape[0], -1, *scores.shape[-2:])
    local_max = jnp.max(logits, -1, keepdims=True)
    local_exps = jnp.exp(logits - local_max)
    local_sum = jnp.sum(local_exps, -1, keepdims=True).transpose(0, 2, 1, 3)
    out = jnp.einsum("bkgts,bskd->btkgd", local_exps.reshape(scores.shape), value)
    return out.reshape(query.shape) / local_sum


def layer(x, p, heads: int):
    heads_of = lambda a: a.reshape(*a.shape[:-1], heads, -1)
    x = checkpoint_name(x.reshape(x.shape), "decoder_layer_input")
    h = norm(x, p["norm1"])
    query = checkpoint_name(rotated(heads_of(h @ p["q"] + p["bq"])), "query_proj")
    key = checkpoint_name(rotated(heads_of(h @ p["k"])), "key_proj")
    value = checkpoint_name(heads_of(h @ p["v"] + p["bv"]), "value_proj")
    out = checkpoint_name(attention(query, key, value), "context")
    x = x + checkpoint_name(out.reshape(x.shape) @ p["o"], "out_proj")
    h = norm(x, p["norm2"])
    gate = checkpoint_name(h @ p["gate"], "mlpwi_0")
    up = checkpoint_name(h @ p["up"], "mlpwi_1")
    return x + checkpoint_name((jax.nn.silu(gate) * up) @ p["down"], "mlpwo")


def decoder(s: Size = SMALL):
    policy = jax.checkpoint_policies.save_only_these_names("query_proj", "key_proj", "value_proj")
    own = functools.partial(layer, heads=s.heads)
    return in_a_scan(s, jax.checkpoint(own, policy=policy, prevent_cse=False))
