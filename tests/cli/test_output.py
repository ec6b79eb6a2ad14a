"""What is shown, and where: a table that fits the terminal, files that are written after it."""

import errno
import io
import os
import re
import sys

import pytest

import jaxmem
from tests.shared.command import Terminal, listing, run
from tests.shared.plans import WHY, plan

pytestmark = pytest.mark.jax_defaults


class Gone(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


class Full(io.StringIO):
    """A file on a disk without room."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def planned(folder, monkeypatch):
    """`jaxmem plan` without the planning."""
    monkeypatch.setattr("jaxmem._cli.steps.make_plan", lambda *_, **__: plan())
    return folder


def on_a_terminal(line: str, columns: int, monkeypatch) -> str:
    """What a line shows on a terminal, without colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert run(line) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("line", ["show plan.json", "plan steps:tiny"])
def test_the_table_fits_the_terminal(line, columns, planned, monkeypatch):
    shown = on_a_terminal(line, columns, monkeypatch)
    assert max(map(len, shown.splitlines())) <= columns
    assert "grouped_symmetric" in shown
    assert "compiled 9.0 MiB of a budget of 10.0 MiB (90.0 %) on" in re.sub(r"\s+", " ", shown)
    why = [line[shown.splitlines()[0].index("why") :] for line in shown.splitlines()]
    assert re.sub(r"\s+", " ", " ".join(why[1:])).strip().startswith(f"{WHY} {WHY}")


def test_without_rich_and_in_a_pipe_the_table_is_plain(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert run("show plan.json") == 0
    assert capsys.readouterr().out == f"{plan()}\n"
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert on_a_terminal("show plan.json", 60, monkeypatch) == f"{plan()}\n"


def test_names_are_shown_as_they_are(folder, monkeypatch):
    plan(notes=("of block[0:6], [red] and :smile:",)).save("markup.json")
    shown = on_a_terminal("show markup.json", 120, monkeypatch)
    assert "note: of block[0:6], [red] and :smile:" in shown


def test_a_plan_is_written_after_it_was_shown(planned, capsys):
    assert run("plan steps:tiny --out new/plan.json --report new/plan.html") == 0
    assert capsys.readouterr().out == f"{plan()}\n"
    assert jaxmem.Plan.load("new/plan.json") == plan()
    assert (planned / "new" / "plan.html").read_text().startswith("<!DOCTYPE html>")


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_plan_that_cannot_be_written_after_all_was_shown(planned, capsys, monkeypatch):
    monkeypatch.setattr("os.fsync", full)
    before = listing(planned)
    assert run("plan steps:tiny --out a.json --report a.html") == 2
    out, err = capsys.readouterr()
    assert out == f"{plan()}\n"
    assert "--out: 'a.json' could not be written: No space left on device" in err
    assert "--report: 'a.html' could not be written" in err
    assert "the result is printed above" in err
    assert listing(planned) == before


def test_a_report_that_cannot_be_written_takes_no_plan_with_it(planned, capsys, monkeypatch):
    monkeypatch.setattr("jaxmem._train.report.report.write_whole", full)
    assert run("plan steps:tiny --report a.html --out a.json") == 2
    assert "--report: 'a.html' could not be written" in capsys.readouterr().err
    assert jaxmem.Plan.load("a.json") == plan()


@pytest.mark.parametrize("stream", [Gone, Full])
def test_a_plan_is_written_even_if_nobody_can_read_it(stream, planned, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream())
    assert run("plan steps:tiny --out a.json") == (0 if stream is Gone else 2)
    assert ("No space left" in capsys.readouterr().err) == (stream is Full)
    assert jaxmem.Plan.load("a.json") == plan()
