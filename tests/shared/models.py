"""Small blocks for training in tests. `block` has every kind of tag, as users write them."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem._core.actions import Choice
from jaxmem._core.assignment import Assignment

TAGS = ("in", "ln", "probs", "mask", "mid", "up", "gelu")
CODEC = {
    "in": "grouped_symmetric(group=64,scale=bfloat16)",
    "ln": "grouped_symmetric(group=64,scale=bfloat16)",
    "probs": "grouped_asymmetric(group=64,scale=bfloat16)",
    "mask": "bit_mask()",
    "mid": "grouped_symmetric(group=64,scale=bfloat16)",
    "up": "channelwise_symmetric(scale=bfloat16)",
    "gelu": "grouped_symmetric(group=64,scale=bfloat16)",
}


def actions(action: str, names=TAGS) -> dict:
    """Returns every tag with one action, and with a codec if the action compresses."""
    choice = lambda name: Choice(action, CODEC[name] if "compress" in action else None)
    return {name: choice(name) for name in names}


def draft(action: str, names=TAGS, block: str = "block") -> Assignment:
    return Assignment({block: actions(action, names)})


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def block(x, p, key):
    """x (B, S, D); p: a (D, D), up (D, F), down (F, D); key: the layer's number. Attention over S,
    dropout, and an MLP.
    """
    x = jaxmem.tag(x, "in", kind="residual")
    n = jaxmem.tag(norm(x), "ln", kind="norm")
    scores = jnp.einsum("bsd,btd->bst", n @ p["a"], n)
    x = x + jnp.einsum("bst,btd->bsd", jaxmem.ops.softmax(scores, "probs"), n)
    places = jnp.arange(x.shape[1] * x.shape[2], dtype=jnp.float32).reshape(x.shape[1:])
    noise = jnp.cos(37 * places + key)  # random bits compile slowly
    mask = jaxmem.tag(jnp.broadcast_to(noise > -0.8, x.shape), "mask", kind="mask")
    x = jaxmem.tag(jnp.where(mask, x / 0.9, jnp.zeros((), x.dtype)), "mid", kind="residual")
    up = jaxmem.tag(norm(x) @ p["up"], "up", kind="linear")
    return x + jaxmem.tag(jax.nn.gelu(up), "gelu", kind="gelu") @ p["down"]


def narrow(x, p, key):
    """As `block`, with only a product, a mask and an activation: quick to profile and to compile,
    for tests of facts that do not depend on the block.
    """
    up = jaxmem.tag(x @ p["up"], "up", kind="linear")
    mask = jaxmem.tag(up > -1, "mask", kind="mask")
    act = jaxmem.tag(jnp.where(mask, jnp.tanh(up) * up, jnp.zeros((), x.dtype)), "act", kind="gelu")
    return x + act @ p["down"]


def parameters(layers=2, width=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(rng.standard_normal((layers, *shape)) / width**0.5, dtype)
    return {"a": make(width, width), "up": make(width, 2 * width), "down": make(2 * width, width)}


def batch(size=2, sequence=8, width=16, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(7).standard_normal((size, sequence, width)), dtype)


def shapes(layers=2, width=16, size=2, sequence=8):
    """Returns the shapes of `parameters` and of `batch`, in float32."""
    return jax.eval_shape(lambda: arrays(layers, width, size, sequence))


def scanned(policy, block=block):
    """Returns loss(p, x) by lax.scan over checkpointed layers. Policy None: no checkpoint."""
    layer = block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)

    def loss(p, x):
        keys = jnp.arange(jax.tree.leaves(p)[0].shape[0], dtype=jnp.float32)
        y, _ = jax.lax.scan(lambda x, one: (layer(x, *one), None), x, (p, keys))
        return (y * y).mean()

    return loss


def unrolled(policy, block=block):
    """Returns loss(p, x) by a Python loop over checkpointed layers."""
    layer = block if policy is None else jax.checkpoint(block, policy=policy)

    def loss(p, x):
        layers = jax.tree.leaves(p)[0].shape[0]
        keys = jnp.arange(layers, dtype=jnp.float32)
        for i in range(layers):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], p), keys[i])
        return (x * x).mean()

    return loss


def arrays(layers=2, width=16, size=2, sequence=8):
    """Returns `parameters` and `batch` of the shapes `shapes`."""
    return parameters(layers, width), batch(size, sequence, width)


def build_of(block, loop=scanned):
    """A plain gradient step of layers, as `build_with` makes it."""
    return build_with(lambda policy: loop(policy, block))


def build_in_float32(layer):
    """build(plan) -> step(w, x) -> w, for `layer(x, w)` in a scan, and a loss in float32."""

    def build(plan):
        run = jax.checkpoint(layer, policy=jaxmem.remat_policy(plan), prevent_cse=False)

        def loss(w, x):
            y, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, w)
            return (y.astype(jnp.float32) ** 2).mean()

        return lambda w, x: jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w, x))

    return build


def build_with(loss_of, microbatches: int = 1):
    """build(plan) -> step(p, x) -> (p, loss), a plain gradient step."""

    def build(plan):
        loss = loss_of(jaxmem.remat_policy(plan))

        def step(p, x):
            both = jax.value_and_grad(loss)
            if microbatches == 1:
                value, grads = both(p, x)
            else:
                parts = x.reshape(microbatches, -1, *x.shape[1:])
                zeros = jnp.zeros((), x.dtype), jax.tree.map(jnp.zeros_like, p)
                add = lambda total, part: (jax.tree.map(jnp.add, total, both(p, part)), None)
                (value, grads), _ = jax.lax.scan(add, zeros, parts)
            return jax.tree.map(lambda w, g: w - jnp.asarray(0.1, w.dtype) * g, p, grads), value

        return step

    return build
