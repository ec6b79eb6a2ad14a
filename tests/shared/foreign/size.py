"""Sizes of foreign models, and helpers that these models share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and its batch, and the dtypes of parameters and activations."""

    width: int
    heads: int
    layers: int
    batch: int
    sequence: int
    vocab: int
    dtype: type = jnp.float32


SMALL = Size(width=32, heads=4, layers=3, batch=2, sequence=12, vocab=48, dtype=jnp.float64)


def normal(seed: int, *shape, scale=0.2, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def perturbed(tree):
    """Returns parameters that are not 0 or 1, since such values can make gradients vanish."""
    leaves, structure = jax.tree.flatten(tree)
    moved = [a + normal(i, *a.shape, scale=0.05, dtype=a.dtype) for i, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, moved)


def tokens(s: Size, seed=0):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(0, s.vocab, (s.batch, s.sequence + 1)))


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()
