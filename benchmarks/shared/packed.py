"""AdamW over microbatches whose sum of gradients lies in the low bits of Adam's second moment: what
the row ratio was chosen over.

Between two microbatches a float32 v holds, in its sign bit and its lowest 11 bits, the sum so far
as a number of 6 exponent and 5 mantissa bits, rounded stochastically; v itself is left with 12 bits
of mantissa. After the last microbatch v takes in the square of the sum, as Adam's does.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

BITS = 11  # below v's own
EXPONENT, MANTISSA = -60, 5  # of the smallest number, and bits
LOW = (1 << BITS) - 1
SIGN = 1 << 31


class Packed(NamedTuple):
    """count: finished minibatches. m: Adam's. word: v and the sum, as uint32."""

    count: Any
    m: Any
    word: Any


def init(params) -> Packed:
    word = lambda p: jnp.zeros(p.shape, jnp.uint32)
    return Packed(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), jax.tree.map(word, params))


def minibatch(state: Packed, gradients: list, b1: float, b2: float, key) -> tuple[Any, Any, Packed]:
    """m and v after a minibatch of microbatches' mean gradients, both corrected for their start,
    and the new state.
    """
    n, done = len(gradients), state.count + 1
    m = jax.tree.map(lambda m, *g: b1 * m + (1 - b1) * sum(g) / n, state.m, *gradients)
    words, structure = jax.tree.flatten(state.word)
    leaves = zip(words, *map(jax.tree.leaves, gradients))
    keys = jax.random.split(jax.random.fold_in(key, state.count), len(words))
    v = jax.tree.unflatten(
        structure,
        [_second(word, [g / n for g in gs], b2, k) for k, (word, *gs) in zip(keys, leaves)],
    )
    word = jax.tree.map(lambda v: jax.lax.bitcast_convert_type(v, jnp.uint32), v)
    corrected = (optax.tree.bias_correction(a, b, done) for a, b in ((m, b1), (v, b2)))
    return *corrected, Packed(done, m, word)


def _second(word, gradients: list, b2: float, key):
    """v after a minibatch."""
    word = (word + (LOW + 1) // 2) & ~jnp.uint32(LOW | SIGN)  # v rounded to the bits that are its
    for i, g in enumerate(gradients[:-1]):
        total = _sum(word) + g
        noise = jax.random.bits(jax.random.fold_in(key, i), total.shape, jnp.uint32)
        word = (word & ~jnp.uint32(LOW | SIGN)) | _code(total, noise)
    total = _sum(word) + gradients[-1]
    v = jax.lax.bitcast_convert_type(word & ~jnp.uint32(LOW | SIGN), jnp.float32)
    return b2 * v + (1 - b2) * total * total


def _code(x, noise):
    """The sign bit and the code of a number."""
    dropped = 23 - MANTISSA
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32) + (noise >> (32 - dropped))
    top, base = bits >> dropped, jnp.uint32((127 + EXPONENT) << MANTISSA)
    code = jnp.where(top > base, jnp.minimum(top - base, LOW), 0)
    return code | jnp.where(x < 0, jnp.uint32(SIGN), jnp.uint32(0))


def _sum(word):
    """The number that a word holds beside v."""
    code = word & LOW
    bits = (code + jnp.uint32((127 + EXPONENT) << MANTISSA)) << (23 - MANTISSA)
    x = jax.lax.bitcast_convert_type(jnp.where(code > 0, bits, jnp.uint32(0)), jnp.float32)
    return jnp.where(word >> 31 == 1, -x, x)
