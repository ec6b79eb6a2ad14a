"""ResNet: He et al.'s size, a bottleneck spelled plainly beside it, statistics of microbatches
against NumPy's.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.command.load import load
from experiments.config.images import ImageConfig, Model
from experiments.models import resnet


def convolutions(*arguments):
    """The results of the convolutions of a function, in order of their first call."""
    eqns = jax.make_jaxpr(arguments[0])(*arguments[1:]).eqns
    return [e.outvars[0].aval for e in eqns if e.primitive.name == "conv_general_dilated"]


def shapes(*overrides):
    config = load("resnet50_imagenet", overrides, ImageConfig)
    return config, jax.eval_shape(functools.partial(resnet.create, config), jax.random.key(0))


@pytest.mark.core
def test_resnet_50_has_its_parameters():
    config, (params, statistics) = shapes()
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(params)) == 25_557_032
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(statistics)) == 53_120
    image = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    scores = jax.eval_shape(resnet.logits(config), params, statistics, image)
    assert (scores.shape, scores.dtype) == ((2, 1000), jnp.float32)


def resolutions(stem, side):
    """Height of what the stem and each stage return."""
    config, states = shapes("model.depth=14", f"model.stem={stem}")
    image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    return [a.shape[1] for a in convolutions(resnet.logits(config), *states, image)]


def test_stems_and_strides():
    stages = [*[56] * 4, 56, *[28] * 3, 28, *[14] * 3, 14, *[7] * 3]
    assert resolutions("imagenet", 224) == [112, *stages]
    assert resolutions("small", 32) == [32, *[32] * 4, 32, *[16] * 3, 16, *[8] * 3, 8, *[4] * 3]


@functools.partial(jax.jit, static_argnums=2)
def plain_conv(x_BHWC, kernel, stride):
    """A sum over the kernel's positions."""
    size = kernel.shape[0]
    x_BHWC = jnp.pad(x_BHWC, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    last = x_BHWC.shape[1] - size + 1
    shifted = lambda i, j: x_BHWC[:, i : i + last : stride, j : j + last : stride]
    return sum(shifted(i, j) @ kernel[i, j] for i in range(size) for j in range(size))


@jax.jit
def plain_norm(x_BHWC, p):
    mean, std = x_BHWC.mean((0, 1, 2)), jnp.sqrt(x_BHWC.var((0, 1, 2)) + 1e-5)
    return (x_BHWC - mean) / std * p["scale"] + p["bias"]


@pytest.mark.quick("2")
@pytest.mark.parametrize("stride", [1, 2])
def test_a_bottleneck_is_the_plain_spelling(stride):
    into = 12 if stride == 1 else 8  # 12 channels out: with and without a projection
    model = Model(depth=14, width=4, classes=2, stem="small")
    block = resnet.Bottleneck(model, into, 3, stride, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    random = lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32)
    graph, params, rest = nnx.split(block, nnx.Param, ...)
    params, x = jax.tree.map(random, params), random(jnp.zeros((4, 6, 6, into)))
    got = nnx.merge(graph, params, rest)(x, True)
    p = nnx.to_pure_dict(params)
    kernels = [p[f"conv{i}"]["kernel"] for i in (1, 2, 3)]
    y = jax.nn.relu(plain_norm(plain_conv(x, kernels[0], 1), p["norm1"]))
    y = jax.nn.relu(plain_norm(plain_conv(y, kernels[1], stride), p["norm2"]))
    y = plain_norm(plain_conv(y, kernels[2], 1), p["norm3"])
    assert ("conv0" in p) == (stride == 2)
    if stride == 2:
        x = plain_norm(plain_conv(x, p["conv0"]["kernel"], stride), p["norm0"])
    np.testing.assert_allclose(got, jax.nn.relu(x + y), rtol=1e-4, atol=1e-4)


def test_running_averages_follow_microbatches_and_evaluation_uses_them():
    norm = resnet.BatchNorm(Model(depth=14, classes=2, stem="small"), 3)
    norm.scale[...], norm.bias[...] = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.0, -1.0])
    rng = np.random.default_rng(0)
    mean, variance = np.zeros(3), np.ones(3)
    for shift in (5.0, -3.0):
        x = rng.normal(shift, 2.0, (4, 5, 5, 3)).astype(np.float32)
        own = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5)
        want = own * [1, 2, 3] + [0.5, 0, -1]
        np.testing.assert_allclose(norm(jnp.asarray(x), True), want, rtol=1e-4, atol=1e-4)
        mean = 0.9 * mean + 0.1 * x.mean((0, 1, 2))
        variance = 0.9 * variance + 0.1 * x.var((0, 1, 2))
    np.testing.assert_allclose(norm.mean[...], mean, rtol=1e-5)
    np.testing.assert_allclose(norm.variance[...], variance, rtol=1e-5)
    want = (x - mean) / np.sqrt(variance + 1e-5) * [1, 2, 3] + [0.5, 0, -1]
    np.testing.assert_allclose(norm(jnp.asarray(x), False), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(norm.mean[...], mean, rtol=1e-5)  # and leaves them


def test_bfloat16_is_computed_between_float32_parameters():
    config, (params, statistics) = shapes("model.depth=14")
    assert config.model.dtype == "bfloat16"
    assert {a.dtype for a in jax.tree.leaves((params, statistics))} == {jnp.dtype("float32")}
    image = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    arguments = resnet.logits(config), params, statistics, image
    assert {a.dtype for a in convolutions(*arguments)} == {jnp.dtype("bfloat16")}
    assert jax.eval_shape(*arguments).dtype == jnp.float32
