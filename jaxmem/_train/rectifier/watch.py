"""When outliers are counted while a model trains, and what was counted of late."""

from collections.abc import Callable
from typing import Any

import jax

from jaxmem._train.rectifier.counts import Counts, Outliers, counted, greatest
from jaxmem._train.rectifier.track import Tracker
from jaxmem.errors import StepError

RECENT = 2  # tracked steps whose counts room is made for


class Watch:
    """Counts outliers at steps 1, 2, 4 and so on, and at each of `every`; errors end it, and not
    the training.

    build, args, codecs: those of `jaxmem.plan`.
    recent: the counts of the latest trackings.
    """

    def __init__(self, build: Callable, args: tuple, codecs: Any, every: int):
        self._given, self._every = (build, args, codecs), every
        self._tracker: Tracker | None = None
        self._scores: dict[int, list[jax.Array]] = {}  # by step; the device need not be waited for
        self._ended = False
        self.recent: list[Counts] = []

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The greatest count of each tag, of the latest trackings."""
        return greatest(self.recent)

    def is_due(self, number: int) -> bool:
        """Whether outliers are counted before this step."""
        return (number & (number - 1) == 0 and number < self._every) or number % self._every == 0

    def look(self, number: int, args: tuple, room: int | None) -> str | None:
        """Begins to count the outliers of a step that is about to run, where it is due; returns
        what went wrong, once.

        room: the bytes that a device has for it, or None.
        """
        if self._ended or not self.is_due(number):
            return None
        try:
            if self._tracker is None:
                self._tracker = Tracker(*self._given)
                self._tracker.compile(*args)
                if room is not None and self._tracker.bytes > room:
                    raise StepError(
                        f"track: counting takes {self._tracker.bytes:,} bytes of a budget of"
                        f" {room:,}"
                    )
            self._scores[number] = self._tracker(*args)
        except Exception as error:  # whatever it is, it is no reason to train no more
            return self._end(error)
        return None

    def seen(self, number: int) -> tuple[list[Outliers], str | None]:
        """What was counted before step `number`, empty where nothing was; and what went wrong."""
        scores = self._scores.pop(number, None)
        if scores is None or self._tracker is None:
            return [], None
        try:
            found = self._tracker.read(number, scores)
        except Exception as error:
            return [], self._end(error)
        self.recent = [*self.recent, counted(found)][-RECENT:]
        return found, None

    def _end(self, error: Exception) -> str:
        self._ended = True
        self._scores.clear()
        return said(error)


def said(error: BaseException) -> str:
    """An error in a line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
