"""Compares gradients, and other trees of arrays."""

import jax
import numpy as np


def close(got, want, rtol=1e-12):
    """Asserts that arrays are equal within `rtol` of each value and of the array's largest."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * np.abs(w).max()),
        got,
        want,
    )


def nonzero(got, want, rtol=1e-12, atol=0.0):
    """Asserts that leaves are equal within `rtol` of each value and `atol`, and are not zero."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(w).max() > 0
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol)


def pairs(got, want) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the leaves of two trees of the same structure, as NumPy arrays."""
    leaves = ([*map(np.asarray, jax.tree.leaves(tree))] for tree in (got, want))
    return [*zip(*leaves, strict=True)]


def farthest(got, want) -> float:
    """Returns the largest difference of two trees."""
    return max(float(np.abs(a - b).max()) for a, b in pairs(got, want))


def nearest(got, want) -> float:
    """Returns the difference of the two leaves that differ least."""
    return min(float(np.abs(a - b).max()) for a, b in pairs(got, want))


def relative(got, want) -> float:
    """Returns the largest difference of two trees, as a share of the largest value of its array."""
    size = lambda a: max(np.abs(a).max(), 1e-30)
    return max(float(np.abs(a - b).max() / size(b)) for a, b in pairs(got, want))


def cosine(got, want) -> float:
    """Returns the cosine of the angle between two trees."""
    flat = lambda tree: np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
    g, w = flat(got), flat(want)
    return float(g @ w / np.linalg.norm(g) / np.linalg.norm(w))
