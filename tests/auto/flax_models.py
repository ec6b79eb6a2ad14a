"""Models of Flax's own parts, without a tag: Linen's transformer and ResNet, and NNX's layers."""

import functools

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.auto.models import (
    HEADS,
    LAYERS,
    VOCAB,
    D,
    cross_entropy,
    normal,
    perturbed,
    tokens,
)


class LinenLayer(linen.Module):
    """A pre-norm transformer layer of Flax's own parts, with dropout."""

    train: bool = True

    @linen.compact
    def __call__(self, x, _=None):
        more = {"param_dtype": jnp.float64, "dtype": jnp.float64}
        h = linen.LayerNorm(**more)(x)
        h = linen.MultiHeadDotProductAttention(
            HEADS,
            dropout_rate=0.1,
            deterministic=not self.train,
            name="attention",
            use_bias=False,
            **more,
        )(h, h)
        x = x + linen.Dropout(0.1, deterministic=not self.train)(h)
        h = linen.LayerNorm(**more)(x)
        h = linen.gelu(linen.Dense(2 * D, name="up", **more)(h))
        return x + linen.Dense(D, name="down", **more)(h), None


class LinenModel(linen.Module):
    scanned: bool

    @linen.compact
    def __call__(self, batch):
        x = linen.Embed(VOCAB, D, param_dtype=jnp.float64)(batch)
        if self.scanned:
            rngs = {"params": True, "dropout": True}
            layers = linen.scan(
                LinenLayer, variable_axes={"params": 0}, split_rngs=rngs, length=LAYERS
            )
            x, _ = layers(name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = LinenLayer(name=f"layer_{i}")(x)
        return linen.Dense(VOCAB, param_dtype=jnp.float64)(x)


def linen_transformer(scanned: bool):
    model, batch = LinenModel(scanned), tokens()
    params = perturbed(
        model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch)
    )

    def loss(params, batch, key):
        logits = model.apply(params, batch[:, :-1], rngs={"dropout": key})
        return cross_entropy(logits, batch[:, 1:]), {
            "logits": logits.mean(),
            "note": "not an array",
        }

    return loss, params, (batch, jax.random.key(2))


class Residual(linen.Module):
    """ResNet's block, with batch statistics."""

    width: int

    @linen.compact
    def __call__(self, x):
        more = {"use_bias": False, "param_dtype": jnp.float64}
        norm = functools.partial(
            linen.BatchNorm, use_running_average=False, param_dtype=jnp.float64
        )
        y = linen.relu(norm()(linen.Conv(self.width, (3, 3), **more)(x)))
        y = norm()(linen.Conv(self.width, (3, 3), **more)(y))
        return linen.relu(x + y)


class ResNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(8, (3, 3), param_dtype=jnp.float64)(x)
        for _ in range(LAYERS):
            x = Residual(8)(x)
        return linen.Dense(5, param_dtype=jnp.float64)(x.mean((1, 2)))


def resnet_with_batch_statistics():
    model, images = ResNet(), normal(0, 4, 8, 8, 3, scale=1.0)
    variables = model.init(jax.random.key(0), images)

    def loss(params, statistics, images, labels):
        logits, changed = model.apply(
            {"params": params, "batch_stats": statistics}, images, mutable=["batch_stats"]
        )
        return cross_entropy(logits, labels), changed

    labels = jnp.arange(4) % 5
    return loss, perturbed(variables["params"]), (variables["batch_stats"], images, labels)


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, 2 * D, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)
        self.statistics = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        h = self.down(nnx.gelu(self.up(self.norm(x))))
        return x + self.dropout(self.statistics(h))


class NNXModel(nnx.Module):
    """Layers in a list, with statistics and counts of random keys that every call changes; in
    float32, as NNX keeps statistics.
    """

    def __init__(self, rngs):
        self.layers = nnx.List([NNXLayer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
