"""The log of the progress of long work, and how it is shown.

On a terminal with rich installed, the progress is one line that is rewritten, with a bar and a
clock. Otherwise each record is a line.
"""

import contextlib
import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Iterator
from typing import Any

LOG = logging.getLogger("jaxmem")
BAR = 12  # columns


class _Lines(logging.Handler):
    """A line for each record, with the seconds since the start: for pipes and files."""

    def __init__(self, stream):
        super().__init__()
        self.stream, self.start = stream, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        elapsed = time.monotonic() - self.start
        print(f"{record.getMessage()} ({elapsed:.0f} s)", file=self.stream, flush=True)


class _Live(logging.Handler):
    """Shows the latest record on one line of a terminal, cut to its width, after a bar and a clock.

    Records with `done` and `of` in their `extra` fill the bar. What is printed meanwhile appears
    above the line.
    """

    def __init__(self, terminal):
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.table import Column
        from rich.text import Text

        class Seconds(ProgressColumn):
            def render(self, task):
                return Text(f"{task.elapsed or 0:.0f} s", style="progress.elapsed")

        super().__init__()
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # the width beside bar and clock
        self.display = Progress(
            BarColumn(BAR, table_column=Column(width=BAR)),
            Seconds(table_column=Column(width=6, justify="right")),
            TextColumn("{task.description}", markup=False, table_column=rest),
            console=terminal,
            expand=True,
            transient=True,
        )
        self.task = self.display.add_task("", total=None)
        self.display.start()  # a thread of its own redraws the line

    def emit(self, record: logging.LogRecord) -> None:
        self.display.update(
            self.task,
            description=record.getMessage(),
            completed=getattr(record, "done", 0),
            total=getattr(record, "of", None),
        )

    def close(self) -> None:
        self.display.stop()
        super().close()


@contextlib.contextmanager
def progress(stream=None) -> Iterator[None]:
    """Shows the progress of planning while the `with` statement runs.

    stream: the output stream. None means standard error.

    On a terminal with rich installed (`pip install 'jaxmem[cli]'`), the progress is one line that
    is rewritten, with a bar of compiles and a clock. Otherwise each log record is a separate line.
    """
    with _shown_by(_handler(stream or sys.stderr)):
        yield


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Shows the progress on a terminal, and then the records with `summary` in their `extra`, on
    standard error. Without a terminal it shows these records alone. If the program has set up
    logging, it shows nothing: the program's handlers receive the log.
    """
    if sys.stderr is None or LOG.hasHandlers() or LOG.level != logging.NOTSET:
        yield
        return
    summaries: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    last = logging.handlers.QueueHandler(summaries)
    last.addFilter(lambda record: hasattr(record, "summary"))
    with _shown_by(last), progress() if sys.stderr.isatty() else contextlib.nullcontext():
        yield
    while not summaries.empty():
        print(summaries.get().getMessage(), file=sys.stderr)


@contextlib.contextmanager
def _shown_by(handler: logging.Handler) -> Iterator[None]:
    """The log, of level INFO and above, goes to the handler too."""
    level = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        handler.close()


def _handler(stream) -> logging.Handler:
    """The handler that shows the log on `stream`. A terminal that cannot move its cursor gets plain
    lines.
    """
    if stream is None:  # standard error is closed
        return logging.NullHandler()
    terminal = console(stream)
    plain = terminal is None or terminal.is_dumb_terminal
    return _Lines(stream) if plain else _Live(terminal)


def console(stream) -> Any:
    """A console of rich on a stream; None without a terminal, and without rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)
