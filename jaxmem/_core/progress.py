"""The log in which long work reports its progress; `jaxmem/_cli/progress.py` shows it for the
command.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator

LOG = logging.getLogger("jaxmem")


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Writes the log's records to standard error, unless the program has set up logging: on a
    terminal all of them, elsewhere those with `last` in their `extra`.
    """
    if LOG.hasHandlers() or LOG.level != logging.NOTSET:
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    terminal = sys.stderr.isatty()
    handler.addFilter(lambda record: terminal or hasattr(record, "last"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(logging.NOTSET)
