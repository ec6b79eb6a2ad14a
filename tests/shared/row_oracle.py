"""AdamA with the row ratio in NumPy, written from its definition alone: lists of arrays, one loop
over microbatches and one over rows.
"""

import math

import numpy as np

MASK = 2**32 - 1


def mixed(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    return ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK


def signs(shape, step: int) -> np.ndarray:
    """1 or -1 for each value, from its number and the step's."""
    of_step = mixed((step + 0x9E3779B9) & MASK)
    bits = [mixed((n * 0x9E3779B1 + of_step) & MASK) >> 31 for n in range(math.prod(shape))]
    return 1.0 - 2.0 * np.array(bits, np.float64).reshape(shape)


def rows_of(shape, stacked=False) -> tuple[int, int]:
    """How many rows, and how many values each has."""
    if len(shape) < 2:
        return (math.prod(shape), 1) if stacked else (1, math.prod(shape))
    axes = len(shape) - 1
    while axes > 2 and math.prod(shape[axes:]) < 256:
        axes -= 1
    return math.prod(shape[:axes]), math.prod(shape[axes:])


def adama(
    params,
    minibatches,
    rate,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    decay=0.0,
    decayed=None,
    stacked=None,
    agreeing=None,
):
    """Parameters after each minibatch, as `adama_oracle.adama` has them.

    stacked: which parameters are stacked by layers.
    agreeing: the largest ratio; None is the number of microbatches.
    """
    params = [np.asarray(p, np.float64) for p in params]
    m, v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    counts = [rows_of(p.shape, s) for p, s in zip(params, stacked or [False] * len(params))]
    square = [np.zeros(rows) for rows, _ in counts]
    history = []
    for t, microbatches in enumerate(minibatches, start=1):
        most = agreeing or len(microbatches)
        m, v = [b1 * a for a in m], [b2 * a for a in v]
        sums = [np.zeros(rows) for rows, _ in counts]
        for gradient in microbatches:
            g = [np.asarray(a, np.float64) / len(microbatches) for a in gradient(params)]
            m = [a + (1 - b1) * b for a, b in zip(m, g)]
            v = [a + (1 - b2) * b**2 for a, b in zip(v, g)]
            for k, shape in enumerate(counts):
                signed = (signs(g[k].shape, t - 1) * g[k]).reshape(shape)
                sums[k] = sums[k] + np.array([math.fsum(row) for row in signed])
        new = []
        for k, (p, shape) in enumerate(zip(params, counts)):
            square[k] = b2 * square[k] + (1 - b2) * sums[k] ** 2
            rows = v[k].reshape(shape)
            ratio = np.ones(shape[0])
            for r, row in enumerate(rows):
                if (total := math.fsum(row)) > 0:
                    ratio[r] = min(max(square[k][r] / total, 1.0), most)
            scaled = (rows * ratio[:, None]).reshape(p.shape)
            step = m[k] / (1 - b1**t) / (np.sqrt(scaled / (1 - b2**t)) + eps)
            weight = decay * (1.0 if decayed is None else decayed[k])
            new.append(p - rate(t - 1) * (step + weight * p))
        params = new
        history.append(params)
    return history
