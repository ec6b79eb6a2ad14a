"""Progress is a line that stays within a terminal and whose clock runs; in a pipe, plain lines."""

import io
import logging
import re
import sys
import threading
import time

import pytest

from jaxmem._core.progress import LOG, progress, reported
from tests.shared.command import Terminal

LONG = "compile 3 and 4 of at most 6; least so far 12.5 GiB, the budget is 12.0 GiB; refining it"


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def lines(stream: io.StringIO) -> list[str]:
    """What was drawn, line by line, without colours and movements of the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line]


def test_the_clock_runs_between_messages_and_stops_with_the_statement(terminal):
    before = set(threading.enumerate())
    with progress(terminal):
        LOG.info("timing")
        time.sleep(1.7)
    clocks = [re.search(r"(\d+) s timing", line) for line in lines(terminal)]
    assert {found[1] for found in clocks if found} >= {"0", "1"}
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()
    drawn = terminal.getvalue()
    time.sleep(0.3)
    assert terminal.getvalue() == drawn


@pytest.mark.parametrize("why", ["a pipe", "no rich", "a terminal that cannot move its cursor"])
def test_plain_lines_where_a_line_cannot_be_rewritten(why, terminal, monkeypatch):
    if why == "a pipe":
        terminal = io.StringIO()
    elif why == "no rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with progress(terminal):
        LOG.info("timing")
        LOG.info(LONG)
    assert terminal.getvalue() == f"timing (0 s)\n{LONG} (0 s)\n"


def test_nothing_is_shown_where_standard_error_is_closed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress(), reported():
        LOG.info("timing", extra={"summary": True})
    assert capsys.readouterr().out == ""


def test_the_log_is_left_as_it_was(terminal):
    handlers, level = list(LOG.handlers), LOG.level
    levels = []

    def fails():
        with progress(terminal):
            levels.append(LOG.level)
            raise KeyError("of the statement")

    with pytest.raises(KeyError, match="of the statement"):
        fails()
    assert levels == [logging.INFO]
    assert (LOG.handlers, LOG.level) == (handlers, level)
