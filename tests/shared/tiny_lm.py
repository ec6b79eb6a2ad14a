"""A language model as embed, block and head, with tied embeddings, dropout and an auxiliary loss,
for tests of released steps.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem

VOCAB, WIDTH, LAYERS, SEQUENCE = 11, 8, 3, 5


def parameters(dtype=np.float64, layers=LAYERS, width=WIDTH, vocab=VOCAB):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, dtype)
    return {
        "blocks": {"down": make(layers, 2 * width, width), "up": make(layers, width, 2 * width)},
        "embedding": make(vocab, width),  # read by both ends
        "final": make(width),  # by the head alone
        "scale": make(width),  # by what all layers share
        "unigram": make(vocab),  # by the head alone; VOCAB is odd, so that no device has a part
    }


def tokens(size, seed=1, vocab=VOCAB, sequence=SEQUENCE):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (size, sequence + 1)))


def embed(outer, batch, key=None):
    x = outer["embedding"][batch[:, :-1]]
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
    # The positions are shared by all layers, and have no derivative.
    return x, outer["scale"], jnp.arange(x.shape[1])


def block(p, x, scale, positions, key=None):
    x = jaxmem.tag(x, "in", kind="residual")
    h = jnp.tanh(jaxmem.tag(x @ p["up"], "up", kind="linear"))
    if key is not None:
        h = h * jax.random.bernoulli(key, 0.9, h.shape)
    return x + (h @ p["down"]) * scale + positions[:, None].astype(x.dtype) / 100


def rooted(p, x, *shared, key=None):
    """A block whose gradient is not finite if its `root` is 0."""
    return block(p, x, *shared) + 0 * jnp.sqrt(p["root"])


def head(outer, x, batch):
    logits = (x * outer["final"]) @ outer["embedding"].T + outer["unigram"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1).mean()


def loss(params, batch, key=None):
    """The loss of the whole model, with the layers in a Python loop."""
    layers = params["blocks"]["up"].shape[0]
    own = lambda i: {} if key is None else {"key": jax.random.fold_in(key, i)}
    x, *shared = embed(params, batch, **own(layers))
    for i in range(layers):
        x = block(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, *shared, **own(i))
    return head(params, x, batch)


def released(tx, block=block, **arguments):
    return jaxmem.released_step(tx, embed, block, head, layers="blocks", **arguments)
