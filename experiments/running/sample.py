"""A text that a trained model makes up, a byte after the other.

Shapes: S sequence, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models.loops import stacked
from experiments.models.split import next_scores

BYTES = 256  # the tokens that are text
LINE = ord("\n")  # what comes before the first byte


def sample(config: Config, params) -> str:
    """`sample.length` bytes, the same for the same parameters and `train.seed`; what is no UTF-8 is
    replaced. Each is drawn after the `train.sequence` bytes before it.
    """
    S, key = config.train.sequence, jax.random.key(config.train.seed)
    draw = jax.jit(functools.partial(_draw, config))
    made = [LINE]
    for number in range(config.sampled):
        seen = made[-S:]
        window_S = np.zeros(S, np.int32)
        window_S[: len(seen)] = seen
        key_of_byte = jax.random.fold_in(key, number)
        made.append(int(draw(params, window_S, len(seen) - 1, key_of_byte)))
    return bytes(made[1:]).decode(errors="replace")


def _draw(config: Config, params, window_S, position, key):
    """What comes after a position of the window; what stands there later is not seen."""
    loop = stacked() if config.streams else None
    rows = jnp.append(window_S, 0)[None]  # as in training, where the last one is a target alone
    scores_V = next_scores(models.split(config), loop)(params, rows, position)[0, :BYTES]
    if not config.sample.temperature:
        return scores_V.argmax()
    return jax.random.categorical(key, scores_V / config.sample.temperature)
