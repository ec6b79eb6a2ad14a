"""A Llama in NumPy and float64, one position, head and pair of features at a time, written from the
papers and not from `experiments/models/llama.py`.
"""

import math

import numpy as np


def rms_norm(x, scale):
    """Zhang and Sennrich (2019), eq. 4; x of one position."""
    return x / math.sqrt(sum(v * v for v in x) / len(x) + 1e-5) * scale


def turned(x, position: int, base: float):
    """Su et al. (2021), eq. 15 and 34, as products of complex numbers; x of one head: pair i is
    features i and i + len(x) / 2.
    """
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    angles = [position * base ** (-2 * i / len(x)) for i in range(half)]
    pairs = pairs * np.exp(1j * np.array(angles))
    return np.concatenate([pairs.real, pairs.imag])


def attention(q_SHK, k_SGK, v_SGK, base: float):
    """(S, H K): head h of the queries reads head h // (H / G) of keys and values (Ainslie et al.,
    2023).
    """
    S, H, K = q_SHK.shape
    shared = H // k_SGK.shape[1]
    out = np.zeros((S, H, K))
    for h in range(H):
        k, v = k_SGK[:, h // shared], v_SGK[:, h // shared]
        for s in range(S):
            query = turned(q_SHK[s, h], s, base)
            scores = [query @ turned(k[t], t, base) / math.sqrt(K) for t in range(s + 1)]
            weights = np.exp(np.array(scores) - max(scores))
            out[s, h] = weights / weights.sum() @ v[: s + 1]
    return out.reshape(S, H * K)


def swiglu(x, gate, up, down):
    """Shazeer (2020), eq. 6; x of one position."""
    g = x @ gate
    return (g / (1 + np.exp(-g)) * (x @ up)) @ down


def block(x_SD, p, heads: int, base: float):
    """One layer on one sequence. `p`: the layer's parameters, named as in `create`, without the
    leading axis of layers.
    """
    S, D = x_SD.shape
    kernel = lambda name: p[name]["kernel"]
    normed = np.stack([rms_norm(x, p["norm1"]["scale"]) for x in x_SD])
    q, k, v = ((normed @ kernel(name)).reshape(S, -1, D // heads) for name in "qkv")
    x_SD = x_SD + attention(q, k, v, base) @ kernel("proj")
    rest = kernel("gate"), kernel("up"), kernel("down")
    return np.stack([x + swiglu(rms_norm(x, p["norm2"]["scale"]), *rest) for x in x_SD])


def loss(params, tokens_BS, heads: int, base: float):
    """Returns the mean cross entropy of next tokens over all sequences, in nats."""
    layers = len(params["blocks"]["q"]["kernel"])
    head = params.get("head", params["embedding"])
    losses = []
    for tokens in tokens_BS:
        x_SD = params["embedding"][tokens[:-1]]
        for i in range(layers):
            own = {n: {k: a[i] for k, a in p.items()} for n, p in params["blocks"].items()}
            x_SD = block(x_SD, own, heads, base)
        for x, target in zip(x_SD, tokens[1:]):
            logits = head @ rms_norm(x, params["final"]["scale"])
            losses.append(math.log(sum(np.exp(logits - logits.max()))) + logits.max())
            losses[-1] -= logits[target]
    return sum(losses) / len(losses)
