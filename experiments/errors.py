"""The errors that a command line reports in one message, and the exit codes."""

import difflib
from collections.abc import Iterable

BAD_INPUT, DIVERGED = 2, 3
SIGNALLED = 128  # and the signal's number, as shells tell it


class InputError(ValueError):
    """What the user gave cannot be used: a config, an override, data, a path."""


class DivergedError(RuntimeError):
    """The loss is no longer finite."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
