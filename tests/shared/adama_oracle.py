"""AdamA in NumPy, written only from Algorithm 1 of the paper: lists of arrays, one loop over
microbatches.
"""

import numpy as np


def adama(params, minibatches, rate, b1=0.9, b2=0.999, eps=1e-8, decay=0.0, decayed=None):
    """Returns the parameters after each minibatch. `minibatches`: for each minibatch, a list of the
    microbatches' gradients as functions of the parameters.

    `rate`: a function of the number of finished minibatches. `decayed`: which parameters decay.
    """
    params = [np.asarray(p, np.float64) for p in params]
    m, v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    history = []
    for t, microbatches in enumerate(minibatches, start=1):
        m, v = [b1 * a for a in m], [b2 * a for a in v]
        for gradient in microbatches:
            g = [np.asarray(a, np.float64) / len(microbatches) for a in gradient(params)]
            m = [a + (1 - b1) * b for a, b in zip(m, g)]
            v = [a + (1 - b2) * b**2 for a, b in zip(v, g)]
        step = [a / (1 - b1**t) / (np.sqrt(b / (1 - b2**t)) + eps) for a, b in zip(m, v)]
        wd = [decay * d for d in (decayed or [True] * len(params))]
        params = [p - rate(t - 1) * (s + w * p) for p, s, w in zip(params, step, wd)]
        history.append(params)
    return history
