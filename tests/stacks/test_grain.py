"""Grain's iterators as the data of a run: their positions are in the run's checkpoints."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.runs import record, train

ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
STEPS, STOPS_AT = 9, 6


def noisy(row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return row + rng.normal(size=row.shape).astype(row.dtype)


def iterator(kind: str):
    """Shuffled rows, with noise of the position's own, in batches that run over the epoch's end."""
    rows = grain.MapDataset.source(ROWS).seed(3).shuffle().repeat().random_map(noisy).batch(8)
    return iter(rows if kind == "map" else rows.to_iter_dataset())


def trained(out, data, stops_at: int | None = None):
    """The state after all steps, and the batches that this process read."""
    seen = []

    def step(state, batch):
        if len(seen) + 1 == stops_at:
            raise RuntimeError("stopped")
        seen.append(np.asarray(batch))
        return state + jnp.sum(jnp.tanh(batch), 0), {"loss": jnp.sum(state)}

    with record(out, resume=True) as run:
        first = jnp.zeros(3, jnp.float32)
        state = train(step, first, data, steps=STEPS, run=run, save_every=0)
    return jax.device_get(state), seen


@pytest.mark.parametrize("kind", ["map", "iter"])
def test_a_run_that_stopped_reads_on_where_grain_was(tmp_path, kind):
    whole, batches = trained(tmp_path / "whole", iterator(kind))
    assert len({batch.tobytes() for batch in batches}) == STEPS
    with pytest.raises(RuntimeError, match="stopped"):
        trained(tmp_path / "out", iterator(kind), STOPS_AT)
    resumed, rest = trained(tmp_path / "out", iterator(kind))
    assert 1 <= len(rest) <= STEPS - STOPS_AT + 2
    np.testing.assert_array_equal(np.stack(rest), np.stack(batches[-len(rest) :]))
    np.testing.assert_array_equal(resumed, whole)
