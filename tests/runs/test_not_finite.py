"""A run goes back where a loss is not finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.errors import NotFiniteError
from jaxmem.runs import record, train
from tests.programs import durable_run
from tests.shared.training import checkpoints, fails_at, rows, run, unfinished, worse


def left_out(out):
    return [row["step"] for row in rows(out) if row.get("skipped")]


def test_a_step_that_is_not_finite_is_left_out(tmp_path):
    without = run(tmp_path / "a", data=worse(4, 5))
    found = rows(tmp_path / "a")
    assert [row["step"] for row in found] == list(range(1, 9))
    assert left_out(tmp_path / "a") == [4, 5]
    assert all(np.isfinite(row.get("loss", 0.0)) for row in found)
    # It goes on so after a failure too.
    fails_at(tmp_path / "b", 7, data=worse(4, 5))
    assert run(tmp_path / "b", data=worse(4, 5)) == without
    assert rows(tmp_path / "b") == found


def test_before_the_first_timed_save_it_goes_back_to_the_beginning(tmp_path):
    without = run(tmp_path / "a", data=worse(1, 4))
    assert run(tmp_path / "b", data=worse(1, 4), save_every=1e6) == without
    assert rows(tmp_path / "b") == rows(tmp_path / "a")
    assert checkpoints(tmp_path / "b") == [0, 8]


def test_steps_in_a_row_that_are_not_finite_end_it(tmp_path):
    message = r"step 5: the loss is \w+ .*3\. step in a row; of the checkpoints that of step 2 is"
    with pytest.raises(NotFiniteError, match=message):
        run(tmp_path / "a", data=worse(4, 5, 6))
    with pytest.raises(NotFiniteError, match=r"step 3: .* of the checkpoints that of step 0 is"):
        run(tmp_path / "b", data=worse(1, 2, 3))
    with pytest.raises(NotFiniteError, match=r"step 4: .*for the 1\. step in a row; .* of step 3"):
        run(tmp_path / "c", data=worse(4), not_finite=1)


def spoils(*numbers):
    """Steps whose update spoils the state, while their own metrics are finite."""

    def batch(number):
        return durable_run.batch(number) | {"spoils": number in numbers}

    def step(state, batch):
        batch = dict(batch)
        spoils = batch.pop("spoils")
        (params, *rest), metrics = durable_run.step(state, batch)
        if spoils:
            params = params | {"w": params["w"].at[0, 0].set(jnp.nan)}
        return (params, *rest), metrics

    return {"data": batch, "step": step}


@pytest.mark.quick("saved-1", "not saved-3")
@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("save_every", [0, 1e6], ids=["saved", "not saved"])
def test_a_step_that_spoils_the_state_is_left_out(tmp_path, keep, save_every):
    """Whether or not the spoilt state was saved."""
    given = {"keep": keep, "save_every": save_every}
    found = run(tmp_path / "a", **given, **spoils(5))
    assert left_out(tmp_path / "a") == [5]
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, 9))
    assert found == run(tmp_path / "b", data=worse(5))
    assert len(checkpoints(tmp_path / "a")) <= keep
    assert checkpoints(tmp_path / "a")[-1] == 8


def test_a_spoilt_checkpoint_is_found_out_by_the_run_that_goes_on_from_it(tmp_path):
    out = tmp_path / "out"
    fails_at(out, 6, keep=1, **spoils(5))
    assert checkpoints(unfinished(out)) == [4, 5]
    run(out, keep=1, **spoils(5))
    assert left_out(out) == [5]
    assert checkpoints(out) == [8]


def test_updates_that_spoil_the_state_again_and_again_end_it(tmp_path):
    message = r"step 8: .* for the 3\. step in a row; of the checkpoints that of step 5 is whole"
    with pytest.raises(NotFiniteError, match=message):
        run(tmp_path, steps=30, **spoils(*range(3, 30)))


def test_an_interrupt_beside_a_loss_that_is_not_finite_is_an_interrupt(tmp_path):
    def data(number):
        if number == 3:
            raise KeyboardInterrupt
        return jnp.float32(jnp.nan if number == 2 else number)

    with record(tmp_path / "out", resume=True) as found, pytest.raises(KeyboardInterrupt):
        train(lambda s, b: (s + b, {"loss": b}), jnp.zeros(()), data, steps=6, run=found)
