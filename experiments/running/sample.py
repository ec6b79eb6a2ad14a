"""Samples a text from a trained model, one byte at a time.

Shapes: S sequence, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models import sharding
from experiments.models.loops import stacked
from experiments.models.split import next_scores

BYTES = 256  # the tokens that are text
LINE = ord("\n")  # the byte before the first sampled byte


def sample(config: Config, params) -> str:
    """Returns `sample.length` sampled bytes as text, a function of the parameters and `train.seed`.
    Each byte depends on the `train.sequence` bytes before it. Invalid UTF-8 is replaced.
    """
    S, key = config.train.sequence, jax.random.key(config.train.seed)
    draw = jax.jit(sharding.automatic(functools.partial(_draw, config)))
    made = [LINE]
    for number in range(config.sampled):
        seen = made[-S:]
        window_S = np.zeros(S, np.int32)
        window_S[: len(seen)] = seen
        key_of_byte = jax.random.fold_in(key, number)
        made.append(int(draw(params, window_S, len(seen) - 1, key_of_byte)))
    return bytes(made[1:]).decode(errors="replace")


def _draw(config: Config, params, window_S, position, key):
    """Returns the byte after `position` of the window. Later bytes of the window have no effect."""
    loop = stacked() if config.streams else None
    rows = jnp.append(window_S, 0)[None]  # as in training, where the last token is only a target
    scores_V = next_scores(models.split(config), loop)(params, rows, position)[0, :BYTES]
    if not config.sample.temperature:
        return scores_V.argmax()
    return jax.random.categorical(key, scores_V / config.sample.temperature)
