"""Signals that ask a run to end: SIGTERM, as schedulers send it, and SIGINT, as a terminal does."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SIGNALS = signal.SIGTERM, signal.SIGINT


class Interrupted(KeyboardInterrupt):
    """Raised if a signal ends a run.

    number: the number of the signal. Shells report the exit code 128 + `number`.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class StopRequest:
    """Which signal has asked the run to end, None until then."""

    number: int | None = None


@contextlib.contextmanager
def _handled(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """While the statement runs, `handler` is called for these signals. Outside of the main thread
    signals are as they were, and so is a signal that the process was started to ignore, as shells
    do with SIGINT in the background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def held() -> Iterator[StopRequest]:
    """While the statement runs a signal is noted, so that it may end the run between two steps. A
    second one ends it where it is.
    """
    asked = StopRequest()

    def note(number: int, _) -> None:
        if asked.number is not None:
            raise Interrupted("a second signal came before the run had ended", number)
        asked.number = number

    with _handled(SIGNALS, note):
        yield asked


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """While the statement runs, SIGTERM raises Interrupted, as SIGINT raises KeyboardInterrupt, so
    that locks are released and files are finished.
    """

    def interrupt(number: int, _) -> None:
        raise Interrupted("the process was asked to end", number)

    with _handled([signal.SIGTERM], interrupt):
        yield
