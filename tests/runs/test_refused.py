"""What cannot be trained or gone on with is refused before anything is written."""

import sys

import jax.numpy as jnp
import pytest

from jaxmem.errors import RunError
from jaxmem.runs import record, train
from tests.programs import durable_run
from tests.shared.training import fails_at, run


@pytest.mark.parametrize(("name", "value"), [("keep", 0), ("save_every", -1), ("not_finite", 0)])
def test_wrong_arguments_are_refused(tmp_path, name, value):
    with pytest.raises(RunError, match=rf"got (\w+=\S+, )*{name}={value}[,;]"):
        run(tmp_path / "out", **{name: value})


@pytest.mark.parametrize(
    ("resume", "given", "message"),
    [
        (True, {"data": [1]}, "`data` is list"),
        (True, {"settings": {"rate": float("inf")}}, "`settings` is .*, which a checkpoint cannot"),
        (True, {"state": {}}, "`state` holds no array"),
        (False, {}, "does not go on with"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_first(tmp_path, resume, given, message):
    arguments = {"step": durable_run.step, "state": durable_run.first, "data": durable_run.batch}
    with record(tmp_path, resume=resume) as found, pytest.raises(RunError, match=message):
        train(**arguments | given, steps=1, run=found)


def test_other_settings_or_another_state_are_refused(tmp_path):
    out = tmp_path / "out"
    fails_at(out, 4, settings={"rate": 0.1})
    with pytest.raises(RunError, match=r"with rate = 0.1, and it is 0.2 now; .* overwrite=True"):
        run(out, settings={"rate": 0.2})
    refused, other = pytest.raises(RunError, match=r"where the state has \['w'\]"), jnp.zeros(3)
    with record(out, resume=True) as found, refused:
        given = {"steps": 8, "run": found, "settings": {"rate": 0.1}}
        train(durable_run.step, {"w": other}, durable_run.batch, **given)
    assert isinstance(run(out, settings={"rate": 0.1}), str)


@pytest.mark.parametrize("name", ["mine", "100/mine", "00000100/mine"])
def test_checkpoints_of_somebodys_own_are_left_alone(tmp_path, name):
    """Those of orbax's managers too, which are named by their steps."""
    own = tmp_path / "out" / "checkpoints" / name
    own.parent.mkdir(parents=True)
    own.write_text("a")
    with pytest.raises(RunError, match="checkpoints' is not of a run"):
        run(tmp_path / "out")
    begun = record(tmp_path / "out", resume=True, overwrite=True)
    with pytest.raises(RunError, match="is not of a run"):
        begun.__enter__()
    assert own.read_text() == "a"


def test_checkpoints_without_orbax_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(RunError, match=r"pip install jaxmem\[runs\]"):
        run(tmp_path / "out")


def test_what_a_run_has_done_is_not_taken_back(tmp_path):
    fails_at(tmp_path / "out", 6)
    with pytest.raises(RunError, match="the checkpoint is of step 5, and `steps` is 3"):
        run(tmp_path / "out", steps=3)
    with record(tmp_path / "twice", resume=True) as found:
        arguments = {"steps": 2, "run": found}
        train(lambda s, b: (s, {"loss": b}), jnp.zeros(2), jnp.float32, **arguments)
        with pytest.raises(RunError, match="has been trained in already"):
            train(lambda s, b: (s, {"loss": b}), jnp.zeros(2), jnp.float32, **arguments)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_in_the_place_of_checkpoints_is_told_first(tmp_path, kind):
    out = tmp_path / "out"
    out.mkdir()
    place = out / "checkpoints"
    place.write_text("") if kind == "file" else place.symlink_to(tmp_path)
    with pytest.raises(RunError, match="is not of a run"):
        run(out)
