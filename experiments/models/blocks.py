"""What the layers of a GPT, of a Llama and of a BERT are made of, in Flax NNX.

Shapes: B batch, S and T sequence, D width, H heads, K = D / H.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxmem
from experiments.config import images
from experiments.config.models import Model

INIT = 0.02
Layer = Callable[[Any], dict]  # from a layer's number, which may be traced, to its parameters


def parameter_dtype(model: Model | images.Model):
    """float32 at least, whatever is computed in."""
    return jnp.float64 if model.dtype == "float64" else jnp.float32


class Norm(nnx.Module):
    """Layer norm, computed in the parameters' dtype, returned in the computation's."""

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.dtype, self.wide = jnp.dtype(model.dtype), parameter_dtype(model)
        self.scale = nnx.Param(jnp.ones(model.width, self.wide))
        self.bias = nnx.Param(jnp.zeros(model.width, self.wide))

    def __call__(self, x_BSD):
        x = x_BSD.astype(self.wide)
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return (x * self.scale[...] + self.bias[...]).astype(self.dtype)


def linear(
    model: Model, fan_in: int, fan_out: int, rngs: nnx.Rngs, scale: float = 1.0, bias: bool = True
) -> nnx.Linear:
    return nnx.Linear(
        fan_in,
        fan_out,
        use_bias=bias,
        dtype=jnp.dtype(model.dtype),
        param_dtype=parameter_dtype(model),
        kernel_init=nnx.initializers.normal(INIT * scale),
        rngs=rngs,
    )


def layers(model: Model, make: Callable[[Model, nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> Layer:
    """The layers' parameters one by one, each drawn from a key of its own: a layer is the same
    alone and under `jax.vmap`, by JAX's default generator (of "rbg" vmap draws other numbers).
    """
    keys = jax.random.split(rngs.params(), model.layers)
    return lambda i: pure(make(model, nnx.Rngs(params=keys[i])))


def pure(module: nnx.Module) -> dict:
    """A module's parameters as a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def dropout(x, rate: float, key, name: str):
    """Inverted dropout; the boolean mask is tagged (Adacc stores it in one bit a value)."""
    if not rate or key is None:
        return x
    mask = jax.random.bernoulli(key, jnp.float32(1 - rate), x.shape)
    mask = jaxmem.tag(mask, name, kind="mask")
    return jnp.where(mask, x / (1 - rate), jnp.zeros((), x.dtype))


def attention(model: Model, qkv, key, causal: bool, seen_BT=None):
    """(B, S, D) of queries, keys and values side by side (B, S, 3 D), tagged; `causal`: none sees a
    later position.

    `seen_BT`: True where a position is seen by the others; left out: everywhere.
    """
    B, S, D = *qkv.shape[:2], qkv.shape[2] // 3
    H, K = model.heads, D // model.heads
    qkv = jaxmem.tag(qkv, "qkv", kind="qkv").reshape(B, S, 3, H, K)
    q_BSHK, k_BSHK, v_BSHK = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    mask = None if seen_BT is None else seen_BT[:, None, None]
    if model.attention == "fused":
        out = jax.nn.dot_product_attention(
            q_BSHK, k_BSHK, v_BSHK, mask=mask, is_causal=causal, implementation="xla"
        )
        return out.reshape(B, S, D)
    scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) * K**-0.5
    probs_BHST = dropout(
        probabilities(scores_BHST, causal, mask), model.attention_dropout, key, "attn_mask"
    )
    return jnp.einsum("bhst,bthk->bshk", probs_BHST, v_BSHK).reshape(B, S, D)


def probabilities(scores_BHST, causal: bool, seen=None):
    """Softmax over the positions that are seen, tagged. `seen`: True where one is, of a shape that
    broadcasts to the scores'; left out: everywhere.
    """
    least = jnp.finfo(scores_BHST.dtype).min
    if causal:
        S = scores_BHST.shape[-1]
        scores_BHST = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores_BHST, least)
    if seen is not None:
        scores_BHST = jnp.where(seen, scores_BHST, least)
    return jaxmem.ops.softmax(scores_BHST, "probs")
