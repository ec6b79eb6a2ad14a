"""A Llama of 7 billion parameters with adapters of low rank (LoRA), from shapes alone: its base is
frozen, in bfloat16 or in 8 bits with a scale for each column.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem


@dataclasses.dataclass(frozen=True)
class Llama:
    """The sizes of Llama 2 7B, the rank of the adapters, and the tokens of a batch.

    base: the dtype of the frozen weights; None trains all weights, in float32, without adapters.
    """

    layers: int = 32
    width: int = 4096
    mlp: int = 11_008
    heads: int = 32
    vocab: int = 32_000
    rank: int = 16
    batch: int = 8
    sequence: int = 1024
    base: str | None = "bfloat16"

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        square, wide = (self.width, self.width), (self.width, self.mlp)
        names = {"q": square, "k": square, "v": square, "o": square}
        return names | {"gate": wide, "up": wide, "down": wide[::-1]}


def parameters(c: Llama) -> dict[str, Any]:
    """The shapes of the parameters."""
    make = jax.ShapeDtypeStruct
    dtype = jnp.dtype(jnp.float32 if c.base is None else c.base)
    layers: dict[str, Any] = {k: make((c.layers, c.width), jnp.float32) for k in ("ln_1", "ln_2")}
    for name, (inputs, outputs) in c.products.items():
        layers[name] = {"w": make((c.layers, inputs, outputs), dtype)}
        if c.base == "int8":
            layers[name]["scale"] = make((c.layers, outputs), jnp.float32)
        if c.base is not None:
            layers[name] |= {
                "lora_a": make((c.layers, inputs, c.rank), jnp.float32),
                "lora_b": make((c.layers, c.rank, outputs), jnp.float32),
            }
    outside = jnp.float32 if c.base is None else jnp.bfloat16
    return {
        "embedding": make((c.vocab, c.width), outside),
        "layers": layers,
        "norm": make((c.width,), jnp.float32),
        "head": make((c.width, c.vocab), outside),
    }


def trainable(params) -> Any:
    """The adapters alone."""
    is_adapter = lambda path, _: str(getattr(path[-1], "key", "")).startswith("lora")
    return jax.tree.map_with_path(is_adapter, params)


def trained_of(params):
    """The parameters with None in place of frozen ones."""
    return jax.tree.map(lambda a, flag: a if flag else None, params, trainable(params))


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _product(x, p):
    weight = p["w"].astype(x.dtype)
    weight = weight * p["scale"].astype(x.dtype) if "scale" in p else weight
    result = x @ weight
    if "lora_a" not in p:
        return result
    return result + (x @ p["lora_a"].astype(x.dtype)) @ p["lora_b"].astype(x.dtype)


def _rotated(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10_000 ** (jnp.arange(half, dtype=jnp.float32) / half)
    sin, cos = (f(angles)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _layer(c: Llama, x, p):
    heads = lambda a: a.reshape(*a.shape[:2], c.heads, -1)
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    h = _norm(x, p["ln_1"])
    q, k, v = (heads(_product(h, p[name])) for name in "qkv")
    q, k = _rotated(q, positions), _rotated(k, positions)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + _product(attended.reshape(x.shape), p["o"])
    h = _norm(x, p["ln_2"])
    gated = jax.nn.silu(_product(h, p["gate"])) * _product(h, p["up"])
    return x + _product(gated, p["down"])


def loss(c: Llama, params, tokens):
    """The mean loss of next-token prediction; layers compute in bfloat16."""
    x = params["embedding"][tokens[:, :-1]].astype(jnp.bfloat16)
    x, _ = jax.lax.scan(lambda x, p: (_layer(c, x, p), None), x, params["layers"])
    logits = (_norm(x, params["norm"]) @ params["head"].astype(x.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def step_of(c: Llama):
    """The `build` of the step, and the shapes of its arguments."""
    chosen = None if c.base is None else trainable

    def build(plan):
        of = functools.partial(loss, c)
        return jaxmem.released_step(optax.adamw(1e-4), of, plan=plan, trainable=chosen)

    tokens = jax.ShapeDtypeStruct((c.batch, c.sequence + 1), jnp.int32)
    state = jax.eval_shape(lambda params: build(None).init(params, tokens), parameters(c))
    return build, (state, tokens)
