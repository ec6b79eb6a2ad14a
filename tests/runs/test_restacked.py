"""A checkpoint goes on wherever the states of the layers lie: on the device, in host memory, or
partly in each, with copies of parameters.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._train.checkpoints.checkpoints import Checkpoints
from jaxmem.errors import RunError
from tests.shared.outlier_layers import LAYERS, block, parameters

PLACES = {
    "resident": None,
    "streamed": {"persist": 0},
    "both": {"persist": 1},
    "otherwise": {"persist": 2},
    "copies": {"persist": 1, "copies": 1},
    "buffers": {"persist": 0, "copies": 0, "buffers": 1},
}


def step_of():
    return jaxmem.released_step(
        jaxmem.adama(1e-2, accumulation_steps=2),
        lambda outer, x: x * outer["scale"],
        lambda p, x: block(x, p),
        lambda outer, x, batch: ((x * outer["scale"]) ** 2).mean(),
        dtype=jnp.float32,
    )


def state_at(places, layers=LAYERS):
    """A state with moments, in its places."""
    step = step_of()
    state = step.init({"layers": parameters(layers=layers, loud=()), "scale": jnp.ones(())})
    rng = np.random.default_rng(1)
    state = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype) if a.ndim else a, state
    )
    return state if places is None else step.split(state, **places)


@contextlib.contextmanager
def saved(folder, state):
    with Checkpoints(folder, 1) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.wait()
        yield checkpoints


@pytest.mark.quick("resident-streamed", "streamed-resident", "both-otherwise", "copies-buffers")
@pytest.mark.parametrize("wanted", PLACES)
@pytest.mark.parametrize("stored", PLACES)
def test_layers_are_divided_anew(tmp_path, stored, wanted):
    with saved(tmp_path, state_at(PLACES[stored])) as checkpoints:
        like = state_at(PLACES[wanted])
        found = checkpoints.newest().state(like)
    assert jax.tree.structure(found) == jax.tree.structure(like)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert (a.dtype, a.sharding.memory_kind) == (b.dtype, b.sharding.memory_kind)


def test_other_layers_are_refused(tmp_path):
    with saved(tmp_path, state_at({"persist": 1})) as checkpoints:
        with pytest.raises(RunError, match=r"holds .*layers.* \[3, .* where the state has"):
            checkpoints.newest().state(state_at({"persist": 3}, layers=5))
        with pytest.raises(RunError, match="where the state has"):
            checkpoints.newest().state({"other": jnp.ones(3)})
