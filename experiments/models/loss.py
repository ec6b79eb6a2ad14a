"""The head of a language model: logits, and next-token cross entropy. The forward and the backward
of the cross entropy loop over chunks of positions, so that the whole logits never exist.
"""

import functools

import jax
import jax.numpy as jnp

from experiments.models.sharding import like, typed


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(hidden_BSD, embedding_VD, targets_BS, chunk: int):
    """Returns the mean loss in nats per position. Logits of `chunk` positions are live at once, in
    the forward and the backward.
    """
    chunks = _chunks(hidden_BSD, targets_BS, chunk)
    add = lambda total, one: (total + _chunk_loss(one[0], one[1], embedding_VD), None)
    total, _ = jax.lax.scan(add, jnp.zeros((), _wide(hidden_BSD)), chunks)
    return total / targets_BS.size


def _forward(hidden_BSD, embedding_VD, targets_BS, chunk: int):
    return cross_entropy(hidden_BSD, embedding_VD, targets_BS, chunk), (
        hidden_BSD,
        embedding_VD,
        targets_BS,
    )


def _backward(chunk: int, residuals, d_loss):
    """The backward is explicit: the derivative of a scan starts from zeros, which XLA would keep in
    memory during a loop over microbatches.
    """
    hidden_BSD, embedding_VD, targets_BS = residuals
    narrow_VD = embedding_VD.astype(hidden_BSD.dtype)

    def one(d_embedding_VD, inputs):
        hidden_BCD, targets_BC = inputs
        _, pull = jax.vjp(lambda h, e: _chunk_loss(h, targets_BC, e), hidden_BCD, narrow_VD)
        d_hidden_BCD, more_VD = pull(d_loss / targets_BS.size)
        return d_embedding_VD + more_VD, d_hidden_BCD

    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), narrow_VD.dtype), d_loss))
    start_VD = jnp.broadcast_to(zero, narrow_VD.shape, out_sharding=like(narrow_VD))
    d_embedding_VD, d_chunks = jax.lax.scan(
        one, start_VD, _chunks(hidden_BSD, targets_BS, chunk), reverse=True
    )
    d_hidden_BSD = d_chunks.swapaxes(0, 1).reshape(hidden_BSD.shape)
    return d_hidden_BSD, d_embedding_VD.astype(embedding_VD.dtype), None


cross_entropy.defvjp(_forward, _backward)


def _wide(hidden):
    return jnp.float64 if hidden.dtype == jnp.float64 else jnp.float32


def logits(hidden_BSD, embedding_VD):
    """Returns logits (B, S, V) in float32 at least."""
    narrow_VD = embedding_VD.astype(hidden_BSD.dtype)
    return jnp.einsum("bsd,vd->bsv", hidden_BSD, narrow_VD).astype(_wide(hidden_BSD))


def _chunk_loss(hidden_BCD, targets_BC, embedding_VD):
    logits_BCV = logits(hidden_BCD, embedding_VD)
    return (jax.nn.logsumexp(logits_BCV, -1) - _picked(logits_BCV, targets_BC)).sum()


def _picked(logits_BCV, targets_BC):
    """Returns the logits of the targets. With explicit axes, by a sum: no gather reads along an
    axis that devices divide.
    """
    if not typed():
        return jnp.take_along_axis(logits_BCV, targets_BC[..., None], -1)[..., 0]
    is_target_BCV = targets_BC[..., None] == jnp.arange(logits_BCV.shape[-1])
    return jnp.where(is_target_BCV, logits_BCV, 0).sum(-1)


def _chunks(hidden_BSD, targets_BS, chunk: int):
    B, S, D = hidden_BSD.shape
    split = lambda a, *rest: a.reshape(B, S // chunk, chunk, *rest).swapaxes(0, 1)
    return split(hidden_BSD, D), split(targets_BS)
