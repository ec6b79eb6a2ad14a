"""A run that stopped goes on where it was, bit for bit."""

import json
import os

import pytest

from jaxmem.errors import JaxmemWarning
from jaxmem.runs import record, train
from tests.programs import durable_run
from tests.shared.training import Numbers, Stop, checkpoints, fails_at, rows, run, unfinished


@pytest.mark.quick("2", "8")
@pytest.mark.parametrize("at", [2, 3, 5, 8])
def test_a_run_that_failed_goes_on_bit_for_bit(tmp_path, whole, at):
    out = tmp_path / "out"
    with pytest.raises(Stop) as caught:
        run(out, stop=(at, Stop()))
    assert "the run goes on from its last checkpoint" in caught.value.__notes__[0]
    assert run(out) == whole[1]
    assert rows(out) == whole[0]
    assert checkpoints(out)[-1] == 8
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints", "metrics.jsonl", "summary.json"]


def test_where_nothing_is_saved_but_the_beginning_it_begins_again(tmp_path, whole):
    """With other settings too."""
    out = tmp_path / "out"
    fails_at(out, 3, save_every=1e6, settings={"rate": 1})
    assert checkpoints(unfinished(out)) == [0]
    assert run(out, settings={"rate": 2}) == whole[1]
    assert rows(out) == whole[0]


def test_what_is_saved_first_is_of_the_settings_that_it_began_with_last(tmp_path):
    out = tmp_path / "out"
    for rate in (1, 2):
        with pytest.raises(Stop):
            run(out, stop=(2, Stop()), save_every=1e6, settings={"rate": rate})
    notes = json.loads((unfinished(out) / "checkpoints/00000000/manifest.json").read_text())
    assert notes["notes"]["settings"] == {"rate": 2}


def test_rows_of_steps_that_are_done_again_are_let_go_and_torn_ones_too(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 6)
    path = unfinished(out)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    seen = []
    assert run(out, each=lambda number, row: seen.append(number)) == whole[1]
    assert rows(out) == whole[0]
    assert seen == [6, 7, 8]


@pytest.mark.quick('{"loss": 1.0}\\n')
@pytest.mark.parametrize("line", [b'{"step": 2, "lo\n', b"\xff\n", b"[1]\n", b'{"loss": 1.0}\n'])
def test_a_row_that_is_none_is_told_and_those_after_it_stay(tmp_path, whole, line):
    out = tmp_path / "out"
    fails_at(out, 6)
    path = unfinished(out) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line, *lines[2:]]))
    said = r"line 2 of '.*out/unfinished-.*/metrics.jsonl' is no row of a step"
    with pytest.warns(JaxmemWarning, match=said):
        run(out)
    assert rows(out) == [whole[0][0], *whole[0][2:]]


def test_it_goes_on_from_the_one_before_where_the_newest_was_changed(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 6)
    newest = unfinished(out) / "checkpoints" / "00000005"
    # The manifest may be the largest file; it ends in a newline, which it can lose.
    data = (p for p in newest.rglob("*") if p.is_file() and p.name != "manifest.json")
    path = max(data, key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(JaxmemWarning, match="00000005' is not used: "):
        assert run(out) == whole[1]
    assert rows(out) == whole[0]


def test_fewer_are_kept_than_before_and_the_newest_is_broken(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 6, keep=2)
    for path in (unfinished(out) / "checkpoints" / "00000005").rglob("manifest.json"):
        path.unlink()
    with pytest.warns(JaxmemWarning, match="00000005"), pytest.raises(Stop):
        run(out, stop=(6, Stop()), keep=1)
    assert run(out, keep=1) == whole[1]


@pytest.mark.quick("dict")
@pytest.mark.parametrize("kind", [bytes, dict])
def test_an_iterators_position_is_kept(tmp_path, whole, kind):
    def go(stop):
        numbers, steps = Numbers(kind=kind), []

        def step(state, batch):
            steps.append(numbers.at)
            if numbers.at == stop:
                raise Stop
            return durable_run.step(state, batch)

        with record(tmp_path / "out", resume=True) as found:
            given = {"steps": 8, "run": found, "save_every": 0}
            state = train(step, durable_run.first, numbers, **given)
        return steps, durable_run.digest(state)

    with pytest.raises(Stop):
        go(5)
    assert go(None) == ([5, 6, 7, 8], whole[1])


def test_overwriting_forgets_an_unfinished_run(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 4, settings={"rate": 1})
    with pytest.raises(Stop), record(out, resume=True, overwrite=True) as found:
        raise Stop
    assert not found.resumed
    assert run(out, settings={"rate": 2}) == whole[1]


def test_results_are_where_they_were_asked_for_wherever_the_process_goes(
    tmp_path, whole, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def batch(number):
        os.chdir(tmp_path / "elsewhere")
        return durable_run.batch(number)

    assert run("out", data=batch) == whole[1]
    assert rows(tmp_path / "out") == whole[0]
    assert list((tmp_path / "elsewhere").iterdir()) == []
