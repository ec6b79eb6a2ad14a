"""Models whose layers are unlike each other."""

import itertools
import math

import jax
import jax.numpy as jnp

CHANNELS = (4, 8, 16)
ACROSS = 16  # pixels


def normal(key, *shape):
    return jax.random.normal(key, shape, jnp.float32)


def chain(batch: int = 64):
    """Products of unequal widths."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    widths = (16, 48, 96, 64, 128, 80, 56, 40, 72, 10)
    params = [
        (normal(next(keys), a, b) / a**0.5, jnp.full(b, 0.1, jnp.float32))
        for a, b in itertools.pairwise(widths)
    ]

    def loss(params, x):
        for w, b in params:
            x = jax.nn.gelu(x @ w + b)
        return (x**2).mean()

    return loss, params, normal(next(keys), batch, widths[0])


def convolved(x, kernel, stride: int = 1):
    form = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=form)


def normalized(x, scale):
    x = x - x.mean((1, 2, 3), keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean((1, 2, 3), keepdims=True) + 1e-5) * scale


def unet(dtype=jnp.float32, batch: int = 4):
    """A U-Net with residual blocks, skips between its levels, and embeddings of times."""
    keys = iter(jax.random.split(jax.random.key(0), 100))
    params = {}

    def kernel(name, *shape):
        params[name] = normal(next(keys), *shape) / math.prod(shape[:-1]) ** 0.5

    def block(name, before, after):
        kernel(f"{name} first", 3, 3, before, after)
        kernel(f"{name} second", 3, 3, after, after)
        kernel(f"{name} time", 8, after)
        if before != after:
            kernel(f"{name} skip", 1, 1, before, after)
        scales = (jnp.full(n, value, jnp.float32) for n, value in ((before, 1.0), (after, 1.1)))
        params[f"{name} scales"] = (*scales,)

    kernel("in", 3, 3, 3, CHANNELS[0])
    kernel("time", 1, 8)
    channels, skips = CHANNELS[0], [CHANNELS[0]]
    for level, after in enumerate(CHANNELS):
        for i in range(2):
            block(f"down {level} {i}", channels, after)
            channels = after
            skips.append(after)
    for level, after in reversed([*enumerate(CHANNELS)]):
        for i in range(2):
            block(f"up {level} {i}", channels + skips.pop(), after)
            channels = after
    kernel("out", 3, 3, channels, 3)

    def residual(params, name, x, time):
        one, two = params[f"{name} scales"]
        h = convolved(jax.nn.silu(normalized(x, one)), params[f"{name} first"])
        h = h + (time @ params[f"{name} time"])[:, None, None]
        h = convolved(jax.nn.silu(normalized(h, two)), params[f"{name} second"])
        skip = params.get(f"{name} skip")
        return h + (x if skip is None else convolved(x, skip))

    def loss(params, batch):
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        x, times, target = (a.astype(dtype) for a in batch)
        time = jnp.sin(times[:, None] @ params["time"])
        x = convolved(x, params["in"])
        skips = []
        for level in range(len(CHANNELS)):
            for i in range(2):
                x = residual(params, f"down {level} {i}", x, time)
                skips.append(x)
            if level + 1 < len(CHANNELS):
                x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
        for level in reversed(range(len(CHANNELS))):
            for i in range(2):
                x = residual(params, f"up {level} {i}", jnp.concatenate([x, skips.pop()], -1), time)
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        return ((convolved(x, params["out"]) - target) ** 2).astype(jnp.float32).mean()

    x, target = (normal(next(keys), batch, ACROSS, ACROSS, 3) for _ in range(2))
    return loss, params, (x, normal(next(keys), batch), target)


def chunked_loss(layers: int = 4, width: int = 16, vocabulary: int = 64):
    """Layers in a Python loop, and a loss whose logits are computed in chunks by a scan."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers + 3))
    kernel = lambda a, b: normal(next(keys), a, b) / a**0.5
    params = [(kernel(width, 4 * width), kernel(4 * width, width)) for _ in range(layers)]
    head = kernel(width, vocabulary)

    def loss(params, x):
        layers, head = params
        for up, down in layers:
            x = x + jax.nn.gelu(x @ up) @ down

        def chunk(total, rows):
            logits = rows @ head
            return total + jax.nn.logsumexp(logits, axis=-1).sum(), None

        return jax.lax.scan(chunk, jnp.zeros((), x.dtype), x.reshape(4, -1, width))[0] / x.size

    return loss, (params, head), normal(next(keys), 256, width)


def loss_of_couplings(checkpoint):
    """A flow; each layer adds to a sum, which begins as a number."""

    def coupled(x, weights):
        a, b = jnp.split(x, 2, -1)
        scale, shift = jnp.split(jax.nn.relu(a @ weights["in"]) @ weights["out"], 2, -1)
        return jnp.concatenate([b * jnp.exp(jnp.tanh(scale)) + shift, a], -1), scale.sum(-1)

    def loss(params, x):
        total = 0.0
        for weights in params:
            x, one = checkpoint(coupled)(x, weights)
            total += one
        return ((x**2).sum(-1) - total).mean()

    return loss
