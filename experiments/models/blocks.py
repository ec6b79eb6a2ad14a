"""Parts of the layers of GPT, Llama and BERT, in Flax NNX.

Shapes: B batch, S and T sequence, D width, H heads, K = D / H.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmem
from experiments.config import images
from experiments.config.models import Model
from experiments.models.sharding import constrain, like, of_rows, typed

INIT = 0.02
Layer = Callable[[Any], dict]  # a layer's number, which may be traced -> the layer's parameters


def parameter_dtype(model: Model | images.Model):
    """Returns the dtype of parameters: float32 at least, whatever the dtype of computation."""
    return jnp.float64 if model.dtype == "float64" else jnp.float32


class Norm(nnx.Module):
    """Layer norm. It computes in the parameters' dtype and returns the dtype of computation."""

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
    """Returns the function of a layer's parameters. Each layer has a key of its own. So with JAX's
    default generator, a layer alone equals the layer under `jax.vmap`; with "rbg", vmap draws other
    numbers.
    """
    keys = jax.random.split(rngs.params(), model.layers)
    return lambda i: pure(make(model, nnx.Rngs(params=keys[i])))


def pure(module: nnx.Module) -> dict:
    """Returns a module's parameters as a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def dropout(x, rate: float, key, name: str):
    """Inverted dropout; the boolean mask is tagged (Adacc stores it in one bit a value)."""
    if not rate or key is None:
        return x
    mask = jax.random.bernoulli(key, jnp.float32(1 - rate), x.shape, out_sharding=like(x))
    mask = jaxmem.tag(mask, name, kind="mask")
    return jnp.where(mask, x / (1 - rate), jnp.zeros((), x.dtype))


def queries_keys_values(layer: nnx.Linear, x_BSD):
    """Returns queries, keys and values side by side, (B, S, 3 D). With explicit axes, (B, S, 3, D):
    no type describes the division of each third over heads.
    """
    if not typed():
        return layer(x_BSD)
    x_BSD = of_rows(x_BSD)
    D = x_BSD.shape[-1]
    assert layer.bias is not None, "the layers of GPT have biases"
    thirds = lambda a: jax.sharding.reshard(a, P()).astype(x_BSD.dtype).reshape(-1, 3, D)
    kernel_D3D, bias_13D = (
        constrain(thirds(a[...]), "qkv.kernel, heads") for a in (layer.kernel, layer.bias)
    )
    return jnp.einsum("bsd,dce->bsce", x_BSD, kernel_D3D) + bias_13D


def attention(model: Model, qkv, key, causal: bool, seen_BT=None):
    """Returns attention (B, S, D) of queries, keys and values (B, S, 3 D) or (B, S, 3, D), with
    tags. `causal`: no position attends to a later position.

    `seen_BT`: True for positions that others attend to; default: all positions.
    """
    B, S, D = *qkv.shape[:2], math.prod(qkv.shape[2:]) // 3
    H, K = model.heads, D // model.heads
    qkv = jaxmem.tag(qkv, "qkv", kind="qkv").reshape(B, S, 3, H, K)
    q_BSHK, k_BSHK, v_BSHK = (constrain(qkv[:, :, i], "heads_BSHK") for i in range(3))
    mask = None if seen_BT is None else seen_BT[:, None, None]
    if model.attention == "fused":
        out = jax.nn.dot_product_attention(
            q_BSHK, k_BSHK, v_BSHK, mask=mask, is_causal=causal, implementation="xla"
        )
        return constrain(out.reshape(B, S, D), "features_BSF")
    scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) * K**-0.5
    probs_BHST = dropout(
        probabilities(scores_BHST, causal, mask), model.attention_dropout, key, "attn_mask"
    )
    return jnp.einsum("bhst,bthk->bshk", probs_BHST, v_BSHK).reshape(B, S, D)


def probabilities(scores_BHST, causal: bool, seen=None):
    """Returns the tagged softmax over the visible positions. `seen`: True for visible positions, in
    a shape that broadcasts to the scores; default: all positions.
    """
    least = jnp.finfo(scores_BHST.dtype).min
    if causal:
        S = scores_BHST.shape[-1]
        scores_BHST = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores_BHST, least)
    if seen is not None:
        scores_BHST = jnp.where(seen, scores_BHST, least)
    return jaxmem.ops.softmax(scores_BHST, "probs")
