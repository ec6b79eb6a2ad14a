"""A run goes back where a loss is not finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.errors import NotFiniteError
from jaxmem.runs import record, train
from tests.shared.training import Stop, rows, run, worse

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]


def test_a_step_that_is_not_finite_is_left_out(tmp_path):
    without = run(tmp_path / "a", data=worse(4, 5))
    found = rows(tmp_path / "a")
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["step"] for row in found if row.get("skipped")] == [4, 5]
    assert all(np.isfinite(row.get("loss", 0.0)) for row in found)
    # It goes on so after a failure too.
    with pytest.raises(Stop):
        run(tmp_path / "b", data=worse(4, 5), stop=(7, Stop()))
    assert run(tmp_path / "b", data=worse(4, 5)) == without
    assert rows(tmp_path / "b") == found


def test_steps_in_a_row_that_are_not_finite_end_it(tmp_path):
    with pytest.raises(NotFiniteError, match=r"step 6: loss is nan|loss is inf.*3\. step in a row"):
        run(tmp_path / "a", data=worse(4, 5, 6))
    with pytest.raises(NotFiniteError, match="of the checkpoints there is none yet"):
        run(tmp_path / "b", data=worse(2), save_every=1e6)


def test_an_interrupt_beside_a_loss_that_is_not_finite_is_an_interrupt(tmp_path):
    def data(number):
        if number == 3:
            raise KeyboardInterrupt
        return jnp.float32(jnp.nan if number == 2 else number)

    with record(tmp_path / "out", resume=True) as found, pytest.raises(KeyboardInterrupt):
        train(lambda s, b: (s + b, {"loss": b}), jnp.zeros(()), data, steps=6, run=found)
