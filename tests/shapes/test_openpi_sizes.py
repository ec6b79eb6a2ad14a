"""The bytes of openpi's state at openpi's sizes, which docs/libraries.md quotes."""

import functools

import jax
import optax
import pytest

from examples.stacks.openpi_shape import init
from examples.stacks.openpi_sizes import WAYS


@pytest.mark.parametrize(("way", "gigabytes"), [("full", 51.8), ("lora", 11.3)])
def test_bytes_of_the_state(way, gigabytes):
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(functools.partial(init, WAYS[way], optax.adamw(1e-3)), key)
    arrays = [state.params, state.opt_state, state.ema_params]
    leaves = [a for a in jax.tree.leaves(arrays) if jax.numpy.issubdtype(a.dtype, jax.numpy.number)]
    assert sum(a.size * a.dtype.itemsize for a in leaves) / 1e9 == pytest.approx(
        gigabytes, abs=0.05
    )
