"""A run's folder: results appear whole at the end, earlier ones outlive a failure, and two runs do
not mix.
"""

import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import runs
from jaxmem._train.runs import folder as run_folder
from jaxmem.errors import JaxmemWarning, RunError
from tests.shared.children import finding_packages
from tests.shared.report_pages import made
from tests.shared.training import unfinished


def write(out, *losses, overwrite=False, plan=None, **summary):
    with runs.record(out, overwrite=overwrite) as run:
        if plan is not None:
            run.plan(plan)
        for number, loss in enumerate(losses, 1):
            run.row(number, loss=loss)
        run.summary({"config": "a run"} | summary)


def stop(out, error, *losses):
    """A run that `error` ends after its rows."""
    with runs.record(out, overwrite=True) as run:
        run.plan(made())
        for number, loss in enumerate(losses, 1):
            run.row(number, loss=loss)
        raise error


def refused(message, out, **options):
    """Asserts that no run begins in a folder."""
    with pytest.raises(RunError, match=message), runs.record(out, **options):
        pytest.fail("the statement ran")


def losses(out):
    return [loss for _, loss in runs.read(out).losses]


def names(out):
    return sorted(p.name for p in out.iterdir())


@pytest.fixture
def earlier(tmp_path):
    """A folder that holds a finished run and a file of the user's."""
    out = tmp_path / "out"
    write(out, 9.0, plan=made(), config="earlier")
    (out / "report.html").write_text("about the earlier run")
    (out / "notes.txt").write_text("mine")
    return out


def is_as_it_was(out):
    return (
        runs.read(out).name == "earlier"
        and losses(out) == [9.0]
        and (out / "report.html").read_text() == "about the earlier run"
        and (out / "notes.txt").read_text() == "mine"
    )


def test_what_a_run_writes_is_read_back(tmp_path):
    out = tmp_path / "new" / "out"
    with runs.record(out) as run:
        run.plan(made())
        run.row(1, loss=np.float32(5.5), grad_norm=1)
        run.row(2, loss=float("nan"))
        run.summary({"config": "mine", "val_loss": float("inf"), "nested": [{"a": float("nan")}]})
        assert names(out) == [".lock", run.path.name]
        assert names(run.path) == ["metrics.jsonl", "plan.json", "summary.json"]
    assert names(out) == ["metrics.jsonl", "plan.json", "summary.json"]
    found = runs.read(out)
    assert (found.name, found.plan) == ("mine", made())
    assert found.losses[0] == (1.0, 5.5)
    assert np.isnan(found.losses[1][1])
    assert found.summary == {"config": "mine", "val_loss": None, "nested": [{"a": None}]}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 5.5, "grad_norm": 1.0}, {"step": 2, "loss": None}]


def test_rows_without_a_summary_get_one(tmp_path):
    with runs.record(tmp_path) as run:
        run.row(1, loss=1.0)
        run.row(2, loss=1.0)
    assert runs.read(tmp_path).summary == {"steps": 2, "interrupted": False}


def test_a_run_that_writes_nothing_leaves_nothing(tmp_path):
    with runs.record(tmp_path / "new" / "out"):
        assert (tmp_path / "new" / "out").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_replaced_unasked(earlier):
    refused(r"holds the results of a run \(summary\.json\).*overwrite", earlier)
    assert is_as_it_was(earlier)


def test_a_finished_run_goes_when_the_next_one_ends_and_no_file_of_it_is_left(earlier):
    with runs.record(earlier, overwrite=True) as run:
        run.row(1, loss=1.0)
        run.summary({"config": "next"})
        assert is_as_it_was(earlier)
    assert runs.read(earlier).name == "next"
    assert names(earlier) == ["metrics.jsonl", "notes.txt", "summary.json"]


def test_files_of_the_user_with_the_names_of_results_remain(tmp_path):
    made().save(tmp_path / "plan.json")
    for name in ("report.html", "sample.txt"):
        (tmp_path / name).write_text("mine")
    write(tmp_path, 1.0)
    assert names(tmp_path) == [
        "metrics.jsonl", "plan.json", "report.html", "sample.txt", "summary.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "plan.json").read_text()) == made().to_json()


def test_a_plan_alone_is_no_run_and_may_be_replaced(tmp_path):
    for _ in range(2):
        with runs.record(tmp_path) as run:
            run.plan(made())
    assert names(tmp_path) == ["plan.json"]


def test_a_run_that_fails_leaves_the_earlier_one_and_says_where_its_rows_are(earlier):
    with pytest.raises(ZeroDivisionError, match="of mine") as caught:
        stop(earlier, ZeroDivisionError("of mine"), 1.0)
    assert is_as_it_was(earlier)
    rows = unfinished(earlier) / "metrics.jsonl"
    assert caught.value.__notes__ == [f"rows until then are in {rows}"]
    assert json.loads(rows.read_text()) == {"step": 1, "loss": 1.0}
    write(earlier, 2.0, overwrite=True)  # the next run leaves the rows of the failed one alone
    assert json.loads(rows.read_text()) == {"step": 1, "loss": 1.0}
    assert losses(earlier) == [2.0]


def test_a_run_that_fails_before_its_first_row_leaves_nothing(earlier, tmp_path):
    for out in (earlier, tmp_path / "new" / "other"):
        with pytest.raises(ZeroDivisionError, match="of mine"):
            stop(out, ZeroDivisionError("of mine"))
    assert is_as_it_was(earlier)
    assert names(tmp_path) == ["out"]
    assert not list(earlier.glob("unfinished-*"))


def test_what_an_interrupted_run_has_appears(earlier):
    with pytest.raises(KeyboardInterrupt, match="of mine"):
        stop(earlier, KeyboardInterrupt("of mine"), 1.0)
    assert runs.read(earlier).summary == {"steps": 1, "interrupted": True}
    assert losses(earlier) == [1.0]
    assert names(earlier) == ["metrics.jsonl", "notes.txt", "plan.json", "summary.json"]


@pytest.mark.parametrize(
    "number", [np.float32(1.5), np.int64(2), jnp.float32(1.5), np.float32("nan")]
)
def test_a_summary_has_scalars_of_numpy_and_jax(tmp_path, number):
    with runs.record(tmp_path) as run:
        run.summary({"a": number, "b": [number]})
    a = None if np.isnan(number) else number
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": a, "b": [a]}


@pytest.mark.parametrize("left", [0, 1, 3])
def test_missing_rows_are_counted(tmp_path, left):
    with runs.record(tmp_path) as found:
        for number in range(left):
            found.row(number + 1, loss=1.0)
        with pytest.warns(JaxmemWarning, match=f"lacks {5 - left} of the rows of steps 1 to 5"):
            assert len(found.rows_until(5)) == left


def test_of_two_runs_at_once_the_second_is_refused(tmp_path):
    with runs.record(tmp_path) as run:
        run.row(1, loss=1.0)
        message = rf"another run is writing .*process {os.getpid()} on"
        refused(message, tmp_path, overwrite=True)
        run.row(2, loss=2.0)
    assert losses(tmp_path) == [1.0, 2.0]
    assert names(tmp_path) == ["metrics.jsonl", "summary.json"]


CHILD = """
import sys, time
from jaxmem import runs
with runs.record(sys.argv[1]) as run:
    run.row(1, loss=1.0)
    print("begun", flush=True)
    time.sleep(600)
"""


def test_a_process_that_is_killed_does_not_hold_the_folder_and_leaves_its_rows(tmp_path):
    line, paths = [sys.executable, "-c", CHILD, str(tmp_path)], finding_packages()
    child = subprocess.Popen(line, stdout=subprocess.PIPE, env=paths)
    try:
        assert child.stdout.readline() == b"begun\n"
        refused(f"process {child.pid} on", tmp_path)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    rows = unfinished(tmp_path) / "metrics.jsonl"
    (tmp_path / "unfinished-20000101-000000").mkdir()  # of one that was killed before it had a row
    write(tmp_path, 2.0)
    assert losses(tmp_path) == [2.0]
    assert json.loads(rows.read_text()) == {"step": 1, "loss": 1.0}
    assert names(tmp_path) == ["metrics.jsonl", "summary.json", rows.parent.name]


def test_a_lock_that_was_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Who waited for a lock may be given that of a file that is gone."""
    real, seen = fcntl.flock, []

    def flock(file, how):
        if not seen:
            pathlib.Path(file.name).unlink()
        seen.append(file)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    write(tmp_path, 1.0)
    assert len(seen) == 2
    assert losses(tmp_path) == [1.0]


def test_where_nothing_can_be_locked_it_is_said(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(JaxmemWarning, match=r"cannot be locked \(.*not supported\); do not write"):
        write(tmp_path, 1.0)
    assert losses(tmp_path) == [1.0]


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260101-000000")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="of mine"):
            stop(tmp_path, ZeroDivisionError("of mine"), 1.0)
    expected = ["", "-2", "-3"]
    assert names(tmp_path) == [f"unfinished-20260101-000000{end}" for end in expected]


@pytest.mark.parametrize("inside", [False, True], ids=["a file", "in a file"])
def test_a_place_where_no_folder_can_be_is_told(tmp_path, inside):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "out" if inside else tmp_path / "file"
    refused(rf"cannot write to '{re.escape(str(out))}': .*; expected", out)
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["file"]


def test_an_error_of_the_users_own_is_left_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="of mine"), runs.record(tmp_path / "out"):
        raise FileNotFoundError("of mine")
    assert names(tmp_path) == []


def test_a_file_of_the_users_among_the_unfinished_is_kept(tmp_path):
    with runs.record(tmp_path) as run:
        run.row(1, loss=1.0)
        (run.path / "checkpoint").write_text("mine")
    assert (unfinished(tmp_path) / "checkpoint").read_text() == "mine"
    assert losses(tmp_path) == [1.0]


@pytest.mark.parametrize("moved", range(4))
def test_what_a_killed_process_did_not_move_is_moved_by_the_next(earlier, monkeypatch, moved):
    """Results of a run that has ended are not lost, wherever the process ended that moves them."""
    replace, done = os.replace, []

    def replacing(a, b):
        if pathlib.Path(a).parent.name.startswith("ended-"):
            done.append(a)
            if len(done) > moved:
                raise SystemExit
        replace(a, b)

    def later():
        with runs.record(earlier, overwrite=True) as run:
            run.plan(made())
            run.row(1, loss=5.0)
            run.summary({"config": "later"})
            (run.path / "checkpoints" / "00000001").mkdir(parents=True)

    monkeypatch.setattr(run_folder.os, "replace", replacing)
    with pytest.raises(SystemExit):
        later()
    monkeypatch.setattr(run_folder.os, "replace", replace)
    refused("holds the results of a run", earlier)
    found = runs.read(earlier)
    assert (found.name, found.losses) == ("later", ((1.0, 5.0),))
    files = ["metrics.jsonl", "notes.txt", "plan.json", "summary.json"]
    assert names(earlier) == ["checkpoints", *files]
