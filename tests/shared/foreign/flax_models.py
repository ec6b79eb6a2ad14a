"""Models from parts of Flax, without tags: Linen's transformer and ResNet, and NNX's layers."""

import functools

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.shared.foreign.size import SMALL, Size, cross_entropy, normal, perturbed, tokens


class LinenLayer(linen.Module):
    """A pre-norm transformer layer from parts of Flax, with dropout."""

    size: Size
    train: bool = True

    @linen.compact
    def __call__(self, x, _=None):
        more = {"param_dtype": self.size.dtype, "dtype": self.size.dtype}
        own = {"dropout_rate": 0.1, "deterministic": not self.train, "use_bias": False, **more}
        h = linen.LayerNorm(**more)(x)
        h = linen.MultiHeadDotProductAttention(self.size.heads, name="attention", **own)(h, h)
        x = x + linen.Dropout(0.1, deterministic=not self.train)(h)
        h = linen.LayerNorm(**more)(x)
        h = linen.gelu(linen.Dense(2 * self.size.width, name="up", **more)(h))
        return x + linen.Dense(self.size.width, name="down", **more)(h), None


class LinenModel(linen.Module):
    size: Size
    scanned: bool

    @linen.compact
    def __call__(self, batch):
        s = self.size
        x = linen.Embed(s.vocab, s.width, param_dtype=s.dtype)(batch)
        if self.scanned:
            rngs, axes = {"params": True, "dropout": True}, {"params": 0}
            layers = linen.scan(LinenLayer, variable_axes=axes, split_rngs=rngs, length=s.layers)
            x, _ = layers(s, name="layers")(x, None)
        else:
            for i in range(s.layers):
                x, _ = LinenLayer(s, name=f"layer_{i}")(x)
        return linen.Dense(s.vocab, param_dtype=s.dtype)(x)


def linen_transformer(s: Size = SMALL, *, scanned: bool):
    model, batch = LinenModel(s, scanned), tokens(s)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = perturbed(model.init(keys, batch))

    def loss(params, batch, key):
        logits = model.apply(params, batch[:, :-1], rngs={"dropout": key})
        beside = {"logits": logits.mean(), "note": "not an array"}
        return cross_entropy(logits, batch[:, 1:]), beside

    return loss, params, (batch, jax.random.key(2))


class Residual(linen.Module):
    """ResNet's block, with batch statistics."""

    width: int
    dtype: type

    @linen.compact
    def __call__(self, x):
        more = {"use_bias": False, "param_dtype": self.dtype}
        norm = functools.partial(linen.BatchNorm, use_running_average=False, param_dtype=self.dtype)
        y = linen.relu(norm()(linen.Conv(self.width, (3, 3), **more)(x)))
        y = norm()(linen.Conv(self.width, (3, 3), **more)(y))
        return linen.relu(x + y)


class ResNet(linen.Module):
    size: Size

    @linen.compact
    def __call__(self, x):
        width = self.size.width // 4
        x = linen.Conv(width, (3, 3), param_dtype=self.size.dtype)(x)
        for _ in range(self.size.layers):
            x = Residual(width, self.size.dtype)(x)
        return linen.Dense(5, param_dtype=self.size.dtype)(x.mean((1, 2)))


def resnet_with_batch_statistics(s: Size = SMALL):
    """Returns a ResNet. The images have as many rows as two thirds of the sequence."""
    side = s.sequence * 2 // 3
    model = ResNet(s)
    images = normal(0, 2 * s.batch, side, side, 3, scale=1.0, dtype=s.dtype)
    variables = model.init(jax.random.key(0), images)

    def loss(params, statistics, images, labels):
        logits, changed = model.apply(
            {"params": params, "batch_stats": statistics}, images, mutable=["batch_stats"]
        )
        return cross_entropy(logits, labels), changed

    labels = jnp.arange(2 * s.batch) % 5
    return loss, perturbed(variables["params"]), (variables["batch_stats"], images, labels)


class NNXLayer(nnx.Module):
    def __init__(self, width: int, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.statistics = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        h = self.down(nnx.gelu(self.up(self.norm(x))))
        return x + self.dropout(self.statistics(h))


class NNXModel(nnx.Module):
    """Layers in a list. Every call changes statistics and counts of random keys. The dtype is
    float32, NNX's dtype of statistics.
    """

    def __init__(self, rngs, s: Size = SMALL):
        self.layers = nnx.List([NNXLayer(s.width, rngs) for _ in range(s.layers)])
        self.head = nnx.Linear(s.width, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
