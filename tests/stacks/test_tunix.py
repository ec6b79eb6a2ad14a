"""Tunix's own training loop, in which Tunix jits the step that it is given."""

import functools

import jax
import numpy as np
from flax import nnx

from examples.stacks.tunix import planned, train


def test_tunixs_loop_trains_under_a_plan():
    """jaxmem plans the step inside Tunix's jit."""
    own, trained = train(), train(functools.partial(planned, budget="16MiB"))
    plan = trained.create_train_step_fn().plan
    assert plan.compiled_bytes <= 16 * 2**20 < plan.baseline_bytes
    for a, b in zip(*(jax.tree.leaves(nnx.state(t.model)) for t in (trained, own)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.abs(b).max()))
