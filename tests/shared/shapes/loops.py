"""Steps with loops inside loops. One step accumulates gradients over microbatches by a scan. The
other has groups of layers with local and with global attention, as MaxText's Gemma: local layers
are a scan inside the scan over groups.
"""

import functools

import jax
import jax.numpy as jnp

from examples.stacks.training import RATE, Training, copied
from tests.shared.foreign import plain
from tests.shared.foreign.size import Size, cross_entropy, normal, tokens
from tests.shared.shapes.size import SIZE


def of_loss(jit, loss, params, data, accumulate: int = 1) -> Training:
    """Returns a gradient-descent step of a loss. A scan sums gradients over microbatches."""

    def train_step(params, data):
        if accumulate == 1:
            value, grads = jax.value_and_grad(loss)(params, data)
        else:

            def one(total, rows):
                found = jax.value_and_grad(loss)(params, rows)
                return jax.tree.map(jnp.add, total, found), None

            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            total, _ = jax.lax.scan(one, zeros, data.reshape(accumulate, -1, *data.shape[1:]))
            value, grads = jax.tree.map(lambda a: a / accumulate, total)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    arguments = lambda: ((copied(params), data), {})
    found = lambda args, kwargs, result: (result[1], result[0])
    return Training(jit(train_step, donate_argnums=0), arguments, found, params)


def accumulated(jit=jax.jit, size: Size = SIZE) -> Training:
    loss, params, (data,) = plain.gemma_in_a_scan(size)
    return of_loss(jit, loss, params, data, accumulate=2)


def local_attention(x, p, heads: int, window: int):
    """Attention to the last `window` positions."""
    split = lambda a: a.reshape(*a.shape[:-1], heads, -1)
    q, k, v = split(x @ p["q"] + p["bq"]), split(x @ p["k"]), split(x @ p["v"] + p["bv"])
    back = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    return plain.mixed(q, k, v, (back >= 0) & (back < window)).reshape(x.shape) @ p["o"]


def local_and_global(jit=jax.jit, size: Size = SIZE, locals_: int = 2, remat: bool = True):
    """Each group has `locals_` layers of local attention, and one layer of global attention."""
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=False) if remat else lambda f: f

    @checkpoint
    def local(x, p):
        h = local_attention(plain.rms(x, p["norm1"]), p, size.heads, size.sequence // 4)
        return plain.gated(x + h, p), None

    @checkpoint
    def group(x, p):
        x, _ = jax.lax.scan(local, x, p["local"])
        return plain.gemma_layer(x, p["global"], size.heads), None

    def loss(params, batch):
        x, _ = jax.lax.scan(group, params["embedding"][batch[:, :-1]], params["groups"])
        return cross_entropy(x @ params["embedding"].T, batch[:, 1:])

    groups = {
        "local": plain.layer_parameters(size, 50, stack=(size.layers, locals_)),
        "global": plain.layer_parameters(size, 90, stack=(size.layers,)),
    }
    params = {"groups": groups, "embedding": normal(7, size.vocab, size.width, dtype=size.dtype)}
    return of_loss(jit, loss, params, tokens(size))
