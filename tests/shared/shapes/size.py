"""The size of the models in this folder: a training step takes milliseconds on a CPU."""

import jax.numpy as jnp

from tests.shared.foreign.size import Size

SIZE = Size(width=32, heads=4, layers=4, batch=4, sequence=64, vocab=48, dtype=jnp.float32)
