"""Next-byte cross entropy without the whole logits: a scan over chunks of positions, each under `jax.checkpoint`."""

import jax
import jax.numpy as jnp


def cross_entropy(hidden_BSD, embedding_VD, targets_BS, chunk: int):
    """Mean loss in nats a position. Logits of `chunk` positions are alive at once, forward and backward."""
    B, S, D = hidden_BSD.shape
    wide = jnp.float64 if hidden_BSD.dtype == jnp.float64 else jnp.float32
    embedding_VD = embedding_VD.astype(hidden_BSD.dtype)

    @jax.checkpoint
    def chunk_loss(hidden_BCD, targets_BC):
        logits_BCV = jnp.einsum("bcd,vd->bcv", hidden_BCD, embedding_VD).astype(wide)
        picked_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits_BCV, -1) - picked_BC).sum()

    chunks = (
        hidden_BSD.reshape(B, S // chunk, chunk, D).swapaxes(0, 1),
        targets_BS.reshape(B, S // chunk, chunk).swapaxes(0, 1),
    )
    total, _ = jax.lax.scan(lambda total, one: (total + chunk_loss(*one), None), jnp.zeros((), wide), chunks)
    return total / (B * S)
