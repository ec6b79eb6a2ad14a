"""A model whose parameters determine the outlier channels of its tensors, and a NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem._train.rectifier.track import Tracker

WIDTH, HIDDEN, LAYERS = 40, 80, 3
TAGS = ("in", "ln", "up", "act")  # tags whose outliers are counted


def block(x, p):
    x = jaxmem.tag(x, "in", kind="residual")
    ln = jaxmem.tag(jnp.tanh(x) * p["gain"], "ln", kind="norm")
    up = jaxmem.tag(ln @ p["up"], "up", kind="linear")
    q = jaxmem.tag(jnp.sin(up), "q", kind="qkv")  # whose codec separates no outliers
    act = jaxmem.tag(jnp.maximum(q, 0) * up, "act", kind="gelu")
    return x + act @ p["down"]


def parameters(loud=((3, 5), (), (7,)), layers=LAYERS):
    """`loud`: the outlier channels of each layer's norm."""
    rng = np.random.default_rng(3)
    gain = np.ones((layers, WIDTH))
    for layer, channels in enumerate(loud):
        gain[layer, list(channels)] = 60.0
    make = lambda *shape: rng.standard_normal((layers, *shape)) / np.sqrt(shape[0])
    made = {"gain": gain, "up": make(WIDTH, HIDDEN), "down": make(HIDDEN, WIDTH) / 50}
    return jax.tree.map(jnp.asarray, made)


def batch(size=4, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((size, 6, WIDTH)))


def loss_of(plan, block=block):
    policy = jaxmem.remat_policy(plan)

    def loss(p, x):
        layer = jax.checkpoint(block, policy=policy, prevent_cse=False)
        return (jax.lax.scan(lambda x, q: (layer(x, q), None), x, p)[0] ** 2).mean()

    return loss


def build(plan, block=block):
    def step(p, x):
        loss, gradient = jax.value_and_grad(loss_of(plan, block))(p, x)
        return jax.tree.map(lambda a, g: a - 0.01 * g, p, gradient), {"loss": loss}

    return step


def oracle(p, x):
    """Returns, by tag, the Z-scores of the channels of each layer, computed by NumPy."""
    p, x = jax.tree.map(np.asarray, p), np.asarray(x)
    found = {tag: [] for tag in TAGS}
    for layer in range(len(p["gain"])):
        ln = np.tanh(x) * p["gain"][layer]
        up = ln @ p["up"][layer]
        act = np.maximum(np.sin(up), 0) * up
        for tag, tensor in zip(TAGS, (x, ln, up, act)):
            sums = np.abs(tensor).reshape(-1, tensor.shape[-1]).sum(0)
            found[tag].append((sums - sums.mean()) / sums.std())
        x = x + act @ p["down"][layer]
    return found


def same(found, expected):
    """Asserts that the counts equal the oracle's."""
    assert {one.tag for one in found} == set(expected)
    for one in found:
        scores = expected[one.tag]
        assert one.counts == tuple(int((z > 3).sum()) for z in scores)
        np.testing.assert_allclose(one.greatest, [z.max() for z in scores], rtol=1e-5)
        assert one.places == tuple(tuple(np.flatnonzero(z > 3)) for z in scores)


def tracked(build, *args, step=5):
    """Returns the counts of the step that `build` returns."""
    tracker = Tracker(build, args)
    return tracker.read(step, tracker(*args))
