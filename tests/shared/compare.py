"""Compares gradients."""

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
