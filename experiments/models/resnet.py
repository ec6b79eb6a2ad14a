"""ResNet in Flax NNX: bottleneck blocks (He et al., 2015) with the stride in the 3x3 convolution
(version 1.5).

Batch normalization works per microbatch, as in AdamA's runs: each microbatch is normalized by its
own statistics and updates the running averages. On a mesh, the statistics are over the rows of all
devices. Evaluation uses the running averages.

Shapes: B images, H height, W width, C channels.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.config.images import ImageConfig, Model
from experiments.models.blocks import parameter_dtype
from experiments.models.sharding import constrain

STAGES = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
}  # blocks, by the number of weight layers
EXPANSION, MOMENTUM, EPSILON = 4, 0.9, 1e-5


class BatchNorm(nnx.Module):
    """Batch norm. Computes in the parameters' dtype, and returns the dtype of computation. Flax's
    BatchNorm has float32 averages for float64 too.
    """

    def __init__(self, model: Model, channels: int, scale: float = 1.0):
        self.dtype, self.wide = jnp.dtype(model.dtype), parameter_dtype(model)
        self.scale = nnx.Param(jnp.full(channels, scale, self.wide))
        self.bias = nnx.Param(jnp.zeros(channels, self.wide))
        self.mean = nnx.BatchStat(jnp.zeros(channels, self.wide))
        self.variance = nnx.BatchStat(jnp.ones(channels, self.wide))

    def __call__(self, x_BHWC, train: bool):
        x_BHWC = x_BHWC.astype(self.wide)
        if train:
            mean_C, variance_C = x_BHWC.mean((0, 1, 2)), x_BHWC.var((0, 1, 2))
            self.mean[...] = MOMENTUM * self.mean[...] + (1 - MOMENTUM) * mean_C
            self.variance[...] = MOMENTUM * self.variance[...] + (1 - MOMENTUM) * variance_C
        else:
            mean_C, variance_C = self.mean[...], self.variance[...]
        slope_C = self.scale[...] * jax.lax.rsqrt(variance_C + EPSILON)
        return ((x_BHWC - mean_C) * slope_C + self.bias[...]).astype(self.dtype)


def conv(model: Model, into: int, out: int, size: int, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    """Returns a square convolution without bias, with equal padding on all sides."""
    return nnx.Conv(
        into,
        out,
        (size, size),
        stride,
        padding=[(size // 2, size // 2)] * 2,
        use_bias=False,
        dtype=jnp.dtype(model.dtype),
        param_dtype=parameter_dtype(model),
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        rngs=rngs,
    )


class Bottleneck(nnx.Module):
    """A residual block of three convolutions: 1x1 to `width` channels, 3x3, and 1x1 to 4 * `width`.
    The input is projected if its shape differs from the output's.

    The last norm's scale starts at zero, so that a block without projection starts as the identity
    (Goyal et al., 2017).
    """

    def __init__(self, model: Model, into: int, width: int, stride: int, rngs: nnx.Rngs):
        out = EXPANSION * width
        self.conv1, self.norm1 = conv(model, into, width, 1, rngs), BatchNorm(model, width)
        self.conv2, self.norm2 = conv(model, width, width, 3, rngs, stride), BatchNorm(model, width)
        self.conv3, self.norm3 = conv(model, width, out, 1, rngs), BatchNorm(model, out, scale=0.0)
        self.projects = stride > 1 or into != out
        if self.projects:
            self.conv0, self.norm0 = conv(model, into, out, 1, rngs, stride), BatchNorm(model, out)

    def __call__(self, x_BHWC, train: bool):
        y_BHWC = jax.nn.relu(self.norm1(self.conv1(x_BHWC), train))
        y_BHWC = jax.nn.relu(self.norm2(self.conv2(y_BHWC), train))
        y_BHWC = self.norm3(self.conv3(y_BHWC), train)
        if self.projects:
            x_BHWC = self.norm0(self.conv0(x_BHWC), train)
        return jax.nn.relu(x_BHWC + y_BHWC)


class ResNet(nnx.Module):
    """Stem, four stages of bottlenecks, mean over positions, classes. Each stage after the first
    halves the resolution.
    """

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.model = model
        size, stride = (7, 2) if model.stem == "imagenet" else (3, 1)
        self.stem, self.norm = (
            conv(model, 3, model.width, size, rngs, stride),
            BatchNorm(model, model.width),
        )
        into, names = model.width, []
        for stage, blocks in enumerate(STAGES[model.depth]):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                name, width = f"stage{stage + 1}_block{block + 1}", model.width * 2**stage
                setattr(self, name, Bottleneck(model, into, width, stride, rngs))
                names.append(name)
                into = EXPANSION * width
        self.names = tuple(names)
        wide = parameter_dtype(model)
        self.head = nnx.Linear(into, model.classes, dtype=wide, param_dtype=wide, rngs=rngs)

    def __call__(self, images_BHWC, train: bool):
        x_BHWC = images_BHWC.astype(jnp.dtype(self.model.dtype))
        x_BHWC = jax.nn.relu(self.norm(self.stem(x_BHWC), train))
        if self.model.stem == "imagenet":
            around = (0, 0), (1, 1), (1, 1), (0, 0)
            x_BHWC = jax.lax.reduce_window(
                x_BHWC, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around
            )
        for name in self.names:
            x_BHWC = constrain(getattr(self, name)(x_BHWC, train), "x_BHWC")
        return self.head(x_BHWC.astype(parameter_dtype(self.model)).mean((1, 2)))


def create(config: ImageConfig, key) -> tuple[dict, dict]:
    """Returns (parameters, running averages) of a ResNet, nested dicts of arrays."""
    resnet = ResNet(config.model, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(resnet, nnx.Param)), nnx.to_pure_dict(
        nnx.state(resnet, nnx.BatchStat)
    )


def apply(config: ImageConfig, params, statistics, images_BHWC, train: bool):
    """Returns (logits (B, classes), statistics after these images)."""
    graph, *states = nnx.split(
        nnx.eval_shape(lambda: ResNet(config.model, nnx.Rngs(0))), nnx.Param, nnx.BatchStat
    )
    for state, values in zip(states, (params, statistics)):
        nnx.replace_by_pure_dict(state, values)
    resnet = nnx.merge(graph, *states)
    scores = resnet(images_BHWC, train)
    return scores, nnx.to_pure_dict(nnx.state(resnet, nnx.BatchStat))


def logits(config: ImageConfig):
    """Returns logits(params, statistics, images (B, H, W, 3)) -> (B, classes), normalized by the
    running averages.
    """
    return lambda params, statistics, images_BHWC: apply(
        config, params, statistics, images_BHWC, False
    )[0]


def loss(config: ImageConfig):
    """Returns loss(params, statistics, batch) -> (mean cross entropy in nats, (statistics,
    accuracy)), for one microbatch.
    """

    def of_microbatch(params, statistics, batch):
        scores_BK, statistics = apply(config, params, statistics, batch["images"], True)
        right_B = scores_BK.argmax(-1) == batch["labels"]
        return cross_entropy(scores_BK, batch["labels"]).mean(), (
            statistics,
            right_B.mean(dtype=scores_BK.dtype),
        )

    return of_microbatch


def cross_entropy(scores_BK, labels_B):
    """Returns the cross entropy of each image in nats."""
    picked_B = jnp.take_along_axis(scores_BK, labels_B[:, None], -1)[:, 0]
    return jax.nn.logsumexp(scores_BK, -1) - picked_B
