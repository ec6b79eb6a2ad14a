"""The errors that a command line reports in one message, and the exit codes."""

import difflib
from collections.abc import Iterable

BAD_INPUT, DIVERGED = 2, 3
FAILED = 1  # as after any error that is not expected
SIGNALLED = 128  # plus the signal's number, as in shells


class InputError(ValueError):
    """An input of the user cannot be used: a config, an override, data, a path."""


class AbsentError(RuntimeError):
    """Another process of the run did not start in time."""


class DivergedError(RuntimeError):
    """The loss is no longer finite."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean ...?`, or "" if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
