"""AdamA with the row ratio in NumPy, written only from the definition: lists of arrays, a loop over
microbatches and a loop over rows.
"""

import math

import numpy as np

MASK = 2**32 - 1


def mixed(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    return ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK


def groups_of(count: int, before: int) -> int:
    """In how many groups are `count` rows that follow each other, `before` times: as few as divide
    them and are 32 in all; if more than one, then a multiple of the rows' power of 2, up to 32.
    """
    halves = math.gcd(count, 32)
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    fit = [n for n in divisors if before * n >= 32 and (n == 1 or n % halves == 0)]
    return min(fit, default=count)


def row_axes(shape) -> int:
    """How many of the first axes count rows."""
    axes = len(shape) - 1
    while axes > 2 and math.prod(shape[axes:]) < 256:
        axes -= 1
    return axes


def signs(shape, step: int, stacked=None) -> np.ndarray:
    """1 or -1 for each value; layers have the same, and, where it is not known (None), what the
    first axis of several of rows counts.
    """
    axes = row_axes(shape)
    several = axes > 1 if stacked is None else stacked and axes > 0
    if stacked and len(shape) < 2:
        return np.broadcast_to(signs((), step), shape)
    if several:
        return np.broadcast_to(of_rows(shape[1:], axes - 1, step), shape)
    return of_rows(shape, max(axes, 0), step)


def of_rows(shape, axes: int, step: int) -> np.ndarray:
    """The signs of an array without layers, whose first `axes` axes count its rows."""
    count = shape[axes - 1] if axes else 1
    before, values = math.prod(shape[: max(axes - 1, 0)]), math.prod(shape[axes:])
    groups = groups_of(count, before)
    of_step, made = mixed((step + 0x9E3779B9) & MASK), []
    for i in range(before):
        for r in range(count):
            group = i * groups + r // (count // groups)
            numbers = (group * values + c for c in range(values))
            made += [mixed((n * 0x9E3779B1 + of_step) & MASK) >> 31 for n in numbers]
    return 1.0 - 2.0 * np.array(made, np.float64).reshape(shape)


def rows_of(shape, stacked=None) -> tuple[int, int, int]:
    """In how many groups, how many rows a group, and how many values a row."""
    if len(shape) < 2:
        return (math.prod(shape), 1, 1) if stacked else (1, 1, math.prod(shape))
    axes = row_axes(shape)
    first = axes > 1 if stacked is None else stacked
    groups = shape[0] if first else 1
    return groups, math.prod(shape[:axes]) // groups, math.prod(shape[axes:])


def over(a: float, b: float) -> float:
    return a / b if b > 0 else 1.0


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
    """Returns the parameters after each minibatch, as `adama_oracle.adama` does.

    stacked: whether each parameter is stacked by layers; None if unknown.
    agreeing: the largest ratio; None means the number of microbatches.
    """
    params = [np.asarray(p, np.float64) for p in params]
    m, v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    counts = [rows_of(p.shape, s) for p, s in zip(params, stacked or [None] * len(params))]
    square = [np.zeros(shape[:2]) for shape in counts]
    history = []
    for t, microbatches in enumerate(minibatches, start=1):
        most = agreeing or len(microbatches)
        m, v = [b1 * a for a in m], [b2 * a for a in v]
        sums = [np.zeros(shape[:2]) for shape in counts]
        # The number of equal weights whose average varies as much as the decayed average.
        weights = [b2**i for i in range(t)]
        seen = sum(weights) ** 2 / sum(w * w for w in weights)
        for gradient in microbatches:
            g = [np.asarray(a, np.float64) / len(microbatches) for a in gradient(params)]
            m = [a + (1 - b1) * b for a, b in zip(m, g)]
            v = [a + (1 - b2) * b**2 for a, b in zip(v, g)]
            for k, shape in enumerate(counts):
                of = stacked[k] if stacked else None
                signed = (signs(g[k].shape, t - 1, of) * g[k]).reshape(shape)
                sums[k] = sums[k] + np.array([[math.fsum(row) for row in g] for g in signed])
        new = []
        for k, (p, shape) in enumerate(zip(params, counts)):
            square[k] = b2 * square[k] + (1 - b2) * sums[k] ** 2
            ratio = np.ones(shape[:2])
            for i, group in enumerate(v[k].reshape(shape)):
                totals = [math.fsum(row) for row in group]
                together = over(math.fsum(square[k][i]), math.fsum(totals))
                for r, total in enumerate(totals):
                    own = over(square[k][i][r], total)
                    leaning = (seen * own + 20 * together) / (seen + 20)
                    ratio[i, r] = min(max(leaning, 1.0), most)
            scaled = (v[k].reshape(shape) * ratio[:, :, None]).reshape(p.shape)
            step = m[k] / (1 - b1**t) / (np.sqrt(scaled / (1 - b2**t)) + eps)
            weight = decay * (1.0 if decayed is None else decayed[k])
            new.append(p - rate(t - 1) * (step + weight * p))
        params = new
        history.append(params)
    return history
