"""What a rectifier does in the loop, and its rows: the decisions, and the outliers that were
counted.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxmem._core.files import write_whole
from jaxmem._train.rectifier.rectify import Rectifier
from jaxmem._train.runs.lock import told
from jaxmem._train.runs.read import DECISIONS, OUTLIERS
from jaxmem._train.runs.record import Record, lines_of, rows_until


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no room for what a step allocates."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


class Revised:
    """A rectifier that writes down what it does.

    rectifier: the user's, or None: then nothing is done.
    run: where rows are written.
    steps: how many there are in all.
    """

    def __init__(self, rectifier: Rectifier | None, run: Record, steps: int):
        self._rectifier, self._run, self._steps = rectifier, run, steps
        if rectifier is not None:
            rectifier.begin()

    def look(self, number: int, *args: Any) -> None:
        """Begins to count outliers before a step, where it is due."""
        if self._rectifier is not None:
            self._decided(self._rectifier.look(number, *args))

    def row(self, number: int, seconds: float | None) -> dict[str, float]:
        """What the row of a step that was done says of its outliers. Decides what they ask for."""
        if self._rectifier is None:
            return {}
        self._rectifier.told(seconds)
        found, rows = self._rectifier.seen(number)
        self._decided(rows)
        if not found:
            return {}
        self._append(OUTLIERS, [one.to_json() for one in found])
        numbers = self._rectifier.numbers(found)
        self._decided(self._rectifier.weigh(number, self._steps - number))
        return numbers

    def step(self, number: int):
        """After step `number`: what the next ones run, or None for the same."""
        if self._rectifier is None:
            return None
        step, rows = self._rectifier.ready(number, self._steps - number)
        self._decided(rows)
        return step

    def less(self, number: int, error: RuntimeError):
        """A step that takes less memory, after one that ran out of it. Raises the error, with what
        may help, where there is none.
        """
        if self._rectifier is None:
            error.add_note("train: give it a rectifier, which then plans for less memory")
            raise error
        step, rows = self._rectifier.less(number, error)
        self._decided(rows)
        return step

    def notes(self) -> Mapping[str, Any] | None:
        """What a checkpoint holds of the rectifier."""
        return None if self._rectifier is None else self._rectifier.notes()

    def back(self, step: int, *, begins: bool) -> None:
        """Lets the rows of steps after `step` go, which are done again. What was decided stays in
        force until the process ends: `begins` says that another one goes on.
        """
        for name in (OUTLIERS, DECISIONS) if begins else (OUTLIERS,):
            path = self._run.path / name
            if path.exists() and self._run.writes:
                with told(self._run.folder):
                    write_whole(path, lines_of(rows_until(path, step)[0]))

    def restore(self, step: int, notes: Mapping[str, Any] | None):
        """Goes on from a checkpoint's notes in a run that begins: returns what it runs, or None for
        the step that it was given.
        """
        if self._rectifier is None or notes is None:
            return None
        found, rows = self._rectifier.restore(step, notes)
        self._decided(rows)
        if found is not None:
            self._run.plan(self._rectifier.plan)
        return found

    def close(self) -> None:
        if self._rectifier is not None:
            self._rectifier.close()

    def _decided(self, rows: list[dict[str, Any]]) -> None:
        self._append(DECISIONS, rows)
        if self._rectifier is not None and any(row.get("event") == "swap" for row in rows):
            self._run.plan(self._rectifier.plan)

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = lines_of(rows)
        if lines:
            with (
                told(self._run.folder),
                (self._run.path / name).open("a", encoding="utf-8") as file,
            ):
                file.write(lines)
