"""The checkpoint with the least value of a metric stays."""

import jax.numpy as jnp
import pytest

from jaxmem.errors import JaxmemWarning, RunError
from jaxmem.runs import best, newest, record, train
from tests.shared.refused import refused
from tests.shared.training import Stop, checkpoints, unfinished

EVERY = {1: 5.0, 2: 4.0, 3: 1.0, 4: float("nan"), 5: 3.0, 6: 2.0, 7: 1.0, 8: 6.0}
RARE = {3: 5.0, 6: 2.0, 9: 3.0}


def step(values):
    def step(state, number):
        if number == values.get("fails"):
            raise Stop
        value = {"val": values[number]} if number in values else {}
        return state + 1, {"loss": number} | value

    return step


def trained(out, values, steps=8, **given):
    given = {"save_every": 0, "keep": 2, "best": "val"} | given
    with record(out, resume=True) as run:
        return train(step(values), jnp.zeros(3), lambda n: n, steps=steps, run=run, **given)


def test_the_least_is_kept_beside_the_newest(tmp_path):
    trained(tmp_path, EVERY)
    assert checkpoints(tmp_path) == [3, 7, 8]
    found = best(tmp_path, "val")
    assert (found.step, found.notes["best"]) == (3, {"val": 1.0})
    assert found.state(jnp.zeros(3)).tolist() == [3.0] * 3
    assert newest(tmp_path).step == 8


def test_one_that_is_less_takes_its_place(tmp_path):
    trained(tmp_path, EVERY | {7: 0.5}, steps=10)
    assert checkpoints(tmp_path) == [7, 9, 10]


def test_without_the_option_only_the_newest_stay(tmp_path):
    trained(tmp_path, EVERY, best=None)
    assert checkpoints(tmp_path) == [7, 8]
    with pytest.raises(RunError, match="has no checkpoint with a value of 'val' that is whole"):
        best(tmp_path, "val")


@pytest.mark.parametrize("fails", [None, 7, 9])
def test_a_metric_that_is_seldom_there_saves_where_it_is_the_least(tmp_path, fails):
    given = {"steps": 10, "save_every": 1e6, "keep": 1}
    if fails:
        with pytest.raises(Stop):
            trained(tmp_path, RARE | {"fails": fails}, **given)
        assert checkpoints(unfinished(tmp_path))[-1] == 6
        assert best(tmp_path, "val").step == 6, "of a run that has not ended"
    trained(tmp_path, RARE, **given)
    assert checkpoints(tmp_path) == [6, 10]
    assert best(tmp_path, "val").notes["best"] == {"val": 2.0}


def test_a_metric_of_every_step_does_not_save_in_every_step(tmp_path):
    falling = {number: 10.0 - number for number in range(1, 9)}
    trained(tmp_path, falling, save_every=1e6, keep=9)
    assert checkpoints(tmp_path) == [0, 1, 8], "the first might have been rare"


def test_a_step_that_was_gone_back_to_before_is_not_the_best(tmp_path):
    """A checkpoint that an update spoilt goes, and with it its value."""
    seen = []

    def spoilt(state, number):
        seen.append(number)
        state = state + (jnp.nan if number == 4 else 1)
        return state, {"loss": state[0] if number > 4 else 0.0, "val": 10.0 - 9 * (number == 4)}

    with record(tmp_path, resume=True) as run:
        given = {"steps": 9, "save_every": 0, "best": "val", "run": run}
        train(spoilt, jnp.zeros(3), lambda n: n, **given)
    assert seen.count(4) == 1
    assert best(tmp_path, "val").notes["best"] == {"val": 10.0}
    assert best(tmp_path, "val").step == 3


def test_a_name_that_no_row_has_is_told(tmp_path):
    with pytest.warns(JaxmemWarning, match="`best` is 'vall', and no checkpoint's row has"):
        trained(tmp_path, EVERY, best="vall")


def test_where_the_best_was_changed_the_next_is(tmp_path):
    trained(tmp_path, EVERY, keep=3)
    (tmp_path / "checkpoints/00000003/state/more").write_text("")
    with pytest.warns(JaxmemWarning, match="00000003' is not used"):
        assert best(tmp_path, "val").step == 7


@refused(
    RunError,
    (newest, "`folder` is None; expected the path"),
    (lambda folder: best(folder, "val"), "`folder` is None"),
    (lambda folder: record(folder).__enter__(), "`folder` is None"),
)
def test_a_folder_is_a_path(call):
    call(None)


def test_a_folder_without_checkpoints_is_told(tmp_path):
    with pytest.raises(RunError, match="has no checkpoint that is whole"):
        newest(tmp_path)
