"""How gradients are compared."""

import jax
import numpy as np


def close(got, want, rtol=1e-12):
    """Each array within `rtol`, of each value and of the largest value of the array."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * np.abs(w).max()),
        got,
        want,
    )
