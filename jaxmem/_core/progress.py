"""Shows what jaxmem's log says of long work: one line, rewritten, on a terminal; plain lines in a
pipe.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

LOG = logging.getLogger("jaxmem")
WIDTH = 12


class _Lines(logging.Handler):
    """Records with `done` and `of` in their `extra` have a bar."""

    def __init__(self, stream):
        super().__init__()
        self.stream, self.start, self.terminal = stream, time.monotonic(), stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        elapsed = f"{time.monotonic() - self.start:.0f} s"
        done, of = getattr(record, "done", None), getattr(record, "of", None)
        if not self.terminal:
            print(f"{record.getMessage()} ({elapsed})", file=self.stream, flush=True)
            return
        filled = WIDTH * done // of if done is not None and of else 0
        bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}] " if of else ""
        print(
            f"\r\x1b[K{bar}{record.getMessage()} ({elapsed})", end="", file=self.stream, flush=True
        )

    def clear(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=self.stream, flush=True)


@contextlib.contextmanager
def progress(stream=None) -> Iterator[None]:
    """Shows on `stream` (standard error) how planning goes on while the statement runs.

    One line, rewritten, on a terminal, with a bar of its compiles; a line each in a pipe.
    """
    handler, level = _Lines(stream or sys.stderr), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        handler.clear()
