"""Llama (Touvron et al., 2023) in Flax NNX: RMS norms before each branch, rotary positions, grouped
queries, SwiGLU, no biases, no dropout; a head of its own, or the embedding.

With Mistral's sizes the model is Mistral 7B (Jiang et al., 2023) without the sliding window: here
each position attends to all earlier positions. Up to 4096 positions, both models are equal.

A rotation is linear, and its transpose needs only the angles. So the backward does not read the
input of a rotation, and the tags of queries and keys follow the rotation. Each operand of a product
that the backward reads has a tag, and so has the sigmoid, whose derivative reads its own result.

Shapes: B batch, S and T sequence, D width, H heads of queries, G heads of keys and values,
R = H / G queries per head of keys, K = D / H, I = K / 2 pairs, F features between gate and down,
V vocabulary, L layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxmem
import jaxmem.ops
from experiments.config.models import Model
from experiments.config.text import Config
from experiments.models import gpt
from experiments.models.blocks import (
    INIT,
    Layer,
    layers,
    linear,
    parameter_dtype,
    probabilities,
    pure,
)
from experiments.models.loss import cross_entropy, logits
from experiments.models.sharding import constrain, like, looked_up, of_rows
from experiments.models.split import Split

EPSILON = 1e-5
batch = gpt.batch  # both predict the next token of plain text


class RMSNorm(nnx.Module):
    """x / sqrt(mean x²) * scale (Zhang and Sennrich, 2019, eq. 4). Computes in the parameters'
    dtype, and returns the dtype of computation.
    """

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.dtype, self.wide = jnp.dtype(model.dtype), parameter_dtype(model)
        self.scale = nnx.Param(jnp.ones(model.width, self.wide))

    def __call__(self, x_BSD):
        x = x_BSD.astype(self.wide)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
        return (x * self.scale[...]).astype(self.dtype)


def rotated(x_BSD, K: int, base: float):
    """Rotates the features, in heads of K: position s rotates the pair (i, i + K / 2) of each head
    by the angle s * base ** (-2 i / K). The pairs of Su et al. (2021, eq. 34) are adjacent; the
    columns of q's and k's kernels differ only in their order.
    """
    B, S, D = x_BSD.shape
    wide = jnp.promote_types(x_BSD.dtype, jnp.float32)
    rates_I = base ** (-jnp.arange(0, K, 2, dtype=wide) / K)
    angles_S1I = (jnp.arange(S, dtype=wide)[:, None] * rates_I)[:, None]
    cos, sin = jnp.cos(angles_S1I), jnp.sin(angles_S1I)
    one, other = jnp.split(x_BSD.astype(wide).reshape(B, S, D // K, K), 2, axis=-1)
    turned_BSHK = jnp.concatenate((one * cos - other * sin, other * cos + one * sin), axis=-1)
    return turned_BSHK.reshape(B, S, D).astype(x_BSD.dtype)


def grouped_attention(model: Model, q_BSD, k_BTC, v_BTC):
    """Returns causal attention (B, S, D). R heads of queries share one head of keys and values
    (Ainslie et al., 2023), without copies of the keys and values. C = G K.
    """
    B, S, D = q_BSD.shape
    H, K = model.heads, D // model.heads
    G = k_BTC.shape[2] // K
    k_BTGK, v_BTGK = k_BTC.reshape(B, S, G, K), v_BTC.reshape(B, S, G, K)
    if model.attention == "fused":
        out = jax.nn.dot_product_attention(
            q_BSD.reshape(B, S, H, K), k_BTGK, v_BTGK, is_causal=True, implementation="xla"
        )
        return out.reshape(B, S, D)
    q_BSGRK = q_BSD.reshape(B, S, G, H // G, K)
    scores_BGRST = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK) * K**-0.5
    probs_BGRST = probabilities(scores_BGRST, causal=True)
    return jnp.einsum("bgrst,btgk->bsgrk", probs_BGRST, v_BTGK).reshape(B, S, D)


class Block(nnx.Module):
    """One layer."""

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.model = model
        width, shared, hidden = model.width, model.shared_width, model.hidden_width
        depth_scale = (2 * model.layers) ** -0.5  # as in GPT-2
        self.norm1, self.norm2 = RMSNorm(model, rngs), RMSNorm(model, rngs)
        self.q = linear(model, width, width, rngs, bias=False)
        self.k = linear(model, width, shared, rngs, bias=False)
        self.v = linear(model, width, shared, rngs, bias=False)
        self.proj = linear(model, width, width, rngs, depth_scale, bias=False)
        self.gate = linear(model, width, hidden, rngs, bias=False)
        self.up = linear(model, width, hidden, rngs, bias=False)
        self.down = linear(model, hidden, width, rngs, depth_scale, bias=False)

    def __call__(self, x_BSD):
        model, tag = self.model, jaxmem.tag
        inside = lambda y: constrain(y, "features_BSF")
        turned = lambda y: rotated(inside(y), model.width // model.heads, model.rope_base)
        x_BSD = tag(x_BSD, "resid_in", kind="residual")
        n_BSD = of_rows(tag(self.norm1(x_BSD), "norm1", kind="norm"))
        q_BSD = tag(turned(self.q(n_BSD)), "q", kind="qkv")
        k_BTC = tag(turned(self.k(n_BSD)), "k", kind="qkv")
        v_BTC = tag(inside(self.v(n_BSD)), "v", kind="qkv")
        a_BSD = tag(inside(grouped_attention(model, q_BSD, k_BTC, v_BTC)), "attn", kind="linear")
        x_BSD = tag(x_BSD + self.proj(a_BSD, like(x_BSD)), "mid", kind="residual")
        n_BSD = of_rows(tag(self.norm2(x_BSD), "norm2", kind="norm"))
        gate_BSF = tag(inside(self.gate(n_BSD)), "gate", kind="linear")
        up_BSF = tag(inside(self.up(n_BSD)), "up", kind="linear")
        # Values between 0 and 1, as probabilities are, get the codec of kind softmax.
        share_BSF = jaxmem.ops.sigmoid(gate_BSF, "sigmoid", kind="softmax")
        glu_BSF = tag(gate_BSF * share_BSF * up_BSF, "glu", kind="gelu")
        return x_BSD + self.down(glu_BSF, like(x_BSD))


def parts(config: Config, key) -> tuple[dict, Layer]:
    """Returns a Llama's parameters outside the layers, a nested dict of arrays, and the function of
    a layer's parameters. A tied model has no `head`.
    """
    model, rngs = config.model, nnx.Rngs(params=key)
    wide, normal = parameter_dtype(model), nnx.initializers.normal(INIT)
    ends = ("embedding",) if model.tied else ("embedding", "head")
    outer = {name: normal(rngs.params(), (model.vocab, model.width), wide) for name in ends}
    layer = layers(model, Block, rngs)
    return outer | {"final": pure(RMSNorm(model, rngs))}, layer


def split(config: Config) -> Split:
    """Returns the Llama of next-token prediction. A batch is tokens, int32 (B, S + 1)."""
    model, dtype = config.model, jnp.dtype(config.model.dtype)
    block = nnx.graphdef(nnx.eval_shape(lambda: Block(model, nnx.Rngs(0))))
    final = nnx.graphdef(nnx.eval_shape(lambda: RMSNorm(model, nnx.Rngs(0))))

    def embed(outer, tokens, key=None):
        return looked_up(outer["embedding"].astype(dtype), tokens[:, :-1])

    def layer(parameters, x_BSD, key=None):
        return nnx.merge(block, nnx.State(parameters))(x_BSD)

    def last(outer, x_BSD):
        hidden_BSD = nnx.merge(final, nnx.State(outer["final"]))(x_BSD)
        return hidden_BSD, outer["embedding" if model.tied else "head"]

    def head(outer, x_BSD, tokens):
        return cross_entropy(*last(outer, x_BSD), tokens[:, 1:], config.train.loss_chunk)

    def scores(outer, x_BSD):
        return logits(*last(outer, x_BSD))

    return Split(embed, layer, head, scores)
