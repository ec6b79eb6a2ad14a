"""Rows for TensorBoard are those of metrics.jsonl, each once, however often a run was stopped."""

import json
import struct
import sys

import pytest
from tensorboardX.proto import event_pb2

from jaxmem import runs
from jaxmem.errors import RunError
from tests.programs import durable_run
from tests.shared.training import Stop, unfinished, worse


def events(folder):
    """The events of all files in TensorBoard's order, a file's records behind each other."""
    for path in sorted((folder / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4  # and a sum before and after


def shown(folder):
    """What TensorBoard draws: a start makes it forget what it knows from that step on."""
    found = []
    for event in events(folder):
        if event.session_log.status == event_pb2.SessionLog.START:
            found = [one for one in found if one[0] < event.step]
        found += [(event.step, v.tag, pytest.approx(v.simple_value)) for v in event.summary.value]
    return found


def rows(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], *pair) for row in lines for pair in row.items() if pair[0] != "step"]


def train(out, stop=None, data=durable_run.batch, save_every=0, tensorboard=True):
    def batch(number):
        if number == stop:
            raise Stop
        return data(number)

    with runs.record(out, resume=True, tensorboard=tensorboard) as run:
        given = {"steps": 8, "run": run, "save_every": save_every}
        runs.train(durable_run.step, durable_run.first, batch, **given)


@pytest.mark.quick("1000000.0")
@pytest.mark.parametrize("save_every", [0, 1e6])
def test_steps_that_are_done_again_stand_there_once(tmp_path, save_every):
    for stop in (4, 7, None):
        try:
            train(tmp_path, stop, save_every=save_every)
        except Stop:
            assert shown(unfinished(tmp_path)) == rows(unfinished(tmp_path))
    assert shown(tmp_path) == rows(tmp_path)
    assert [step for step, tag, _ in shown(tmp_path) if tag == "loss"] == list(range(1, 9))


def test_what_was_gone_back_from_is_forgotten(tmp_path):
    """Within a second too, where files would have one name."""
    train(tmp_path, data=worse(3, 6), save_every=1e6)
    assert shown(tmp_path) == rows(tmp_path)
    assert (3, "skipped", 1.0) in shown(tmp_path)


def test_a_run_that_goes_on_with_it_has_the_rows_from_before(tmp_path):
    with pytest.raises(Stop):
        train(tmp_path, 5, tensorboard=False)
    train(tmp_path)
    assert shown(tmp_path) == rows(tmp_path)


def test_rows_of_a_loop_of_ones_own_are_written_too(tmp_path):
    with runs.record(tmp_path, tensorboard=True) as run:
        run.row(1, loss=2.0)
        run.row(3, loss=float("nan"), other=1)
    assert shown(tmp_path)[0] == (1, "loss", 2.0)
    assert [(step, tag) for step, tag, _ in shown(tmp_path)[1:]] == [(3, "loss"), (3, "other")]


def test_a_later_run_has_its_own_or_none(tmp_path):
    for loss, tensorboard in ((1.0, True), (2.0, True), (3.0, False)):
        with runs.record(tmp_path, overwrite=True, tensorboard=tensorboard) as run:
            run.row(1, loss=loss)
        assert (tmp_path / "tensorboard").exists() == tensorboard
        assert not tensorboard or shown(tmp_path) == [(1, "loss", loss)]


def test_a_folder_of_somebodys_own_is_left_alone(tmp_path):
    own = tmp_path / "tensorboard" / "mine"
    own.parent.mkdir()
    own.write_text("a")
    with pytest.raises(RunError, match="tensorboard' is not of a run, which would keep its"):
        runs.record(tmp_path, tensorboard=True).__enter__()
    with runs.record(tmp_path) as run:
        run.row(1, loss=1.0)
    assert own.read_text() == "a"


def test_without_tensorboardx_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RunError, match=r"pip install 'jaxmem\[tensorboard\]'"):
        runs.record(tmp_path / "out", tensorboard=True).__enter__()
    assert list(tmp_path.iterdir()) == []
