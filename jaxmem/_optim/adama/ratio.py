"""The row ratio: a factor for each row by which AdamA's second moment is multiplied, so that it is
Adam's second moment summed over the row.

AdamA's nu gathers the squares of N microbatches' gradients g_i / N, Adam's nu the square of their
sum (AdamA §3.1). If the microbatches of a row have nothing in common, both are equal; if the
microbatches are equal, Adam's nu is N times as large. A row's sum of g_i / N with random signs adds
up over microbatches without a buffer, and its square is on average the squared norm of the sum.

The row ratio leans on its array. One square of a row's signed sum may be far off: its deviation is
√2 of its mean, and a row averages only as many squares as `b2` remembers steps. So a row leans on
the ratio of its array as on `LEAN` = 20 steps of its own. The rows of one array err independently
of each other, at least in groups.

Two alternatives were tried. With the ratio of each row alone, the first steps of a training are a
matter of luck: with some draws of signs a GPT stayed on its first plateau for a fifth of the
training, with other draws it did not. One ratio for a whole array is too coarse later in the
training.
"""

import jax
import jax.numpy as jnp

from jaxmem._core.lists import merged, separated
from jaxmem._optim.adama import rows

LEAN = 20


def scaled(
    nu: list,
    square: list,
    sketch: list,
    *,
    b2,
    done,
    most,
    like: list,
    axis_name: str | None,
    stacked: list[bool | None],
) -> tuple[list, list]:
    """Returns each array's `square` after a minibatch, and its nu times the ratio of each row,
    which is at least 1 and at most `most`.

    nu: the second moment of every array, after the minibatch.
    square: the decayed average of the squared signed sums of each row.
    sketch: the signed sum of each row of this minibatch's gradient.
    b2: the decay rate of `nu` and `square`.
    done: number of finished minibatches, this minibatch included.
    like: the shapes of the whole arrays, if a device has parts.
    axis_name: the mesh axis over which arrays are divided. None: the arrays are whole.
    stacked: whether an array's first axis is the axis of layers, which do not lean on each other.
      None means that this is unknown: an array with several axes of rows then counts as stacked.
    """
    total = [rows.summed(jnp.real(v), s.shape) for v, s in zip(nu, square)]
    arrays = list(zip(nu, square, like, strict=True))
    within = [v.shape[s.ndim :] != a.shape[s.ndim :] for v, s, a in arrays]
    across = [v.shape[: s.ndim] != a.shape[: s.ndim] for v, s, a in arrays]
    total, sketch = _summed_over(axis_name, within, total, sketch)
    square = [(b2 * a + (1 - b2) * rows.square(s)).astype(a.dtype) for a, s in zip(square, sketch)]
    axes = [_leaning(s.ndim, of) for s, of in zip(square, stacked, strict=True)]
    sums = lambda arrays: [a.sum(over, keepdims=True) for a, over in zip(arrays, axes)]
    of_squares, of_nu = _summed_over(axis_name, across, sums(square), sums(total))
    # The number of independent squares of equal weight whose mean varies as much as the decayed
    # average.
    seen = (1 + b2) / (1 - b2) * (1 - b2**done) / (1 + b2**done)
    ratios = [
        (seen * _divided(a, v) + LEAN * _divided(whole_a, whole_v)) / (seen + LEAN)
        for a, v, whole_a, whole_v in zip(square, total, of_squares, of_nu)
    ]
    clipped = [jnp.clip(r, 1, most) for r in ratios]
    return square, [v * rows.spread(r, v) for v, r in zip(nu, clipped)]


def _leaning(axes: int, stacked: bool | None) -> tuple[int, ...]:
    """Returns the axes along which an array's rows lean on each other."""
    kept = axes > 1 if stacked is None else stacked
    return tuple(range(int(kept), axes))


def _divided(a, b):
    """Returns a / b, and 1 where b is 0: without a gradient, nothing is scaled."""
    positive = b > 0
    return jnp.where(positive, a / jnp.where(positive, b, 1), 1)


def _summed_over(axis_name: str | None, which: list[bool], *lists: list) -> tuple[list, ...]:
    """Returns the arrays of each list. Arrays with a true entry in `which` are summed over devices,
    by one collective for all lists.
    """
    if not any(which):
        return lists
    assert axis_name is not None, "arrays are parts, and there is no axis"
    parts, whole = zip(*(separated(arrays, which) for arrays in lists))
    sums = jax.lax.psum(parts, axis_name)
    return tuple(merged(pair, which) for pair in zip(sums, whole))
