"""Runs a rectifier in the training loop, and writes its rows: decisions and counted outliers."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from jaxmem._core.files import write_whole
from jaxmem._train.rectifier.rectify import Rectifier
from jaxmem._train.runs.lock import told
from jaxmem._train.runs.record import Record, lines_of, rows_until
from jaxmem._train.runs.run import DECISIONS, OUTLIERS

T = TypeVar("T")


class Revised:
    """Runs a rectifier during training, and writes its rows.

    rectifier: the user's rectifier, or None, which does nothing.
    run: the record that the rows are written to.
    steps: number of steps in total.
    """

    def __init__(self, rectifier: Rectifier | None, run: Record, steps: int):
        self._rectifier, self._run, self._steps = rectifier, run, steps
        if rectifier is not None:
            rectifier.begin()

    def look(self, number: int, *args: Any) -> None:
        """Starts to count outliers before a step, if a count is due."""
        if self._rectifier is not None:
            self._decided(None, self._rectifier.look(number, *args))

    def row(self, number: int, seconds: float | None) -> dict[str, float]:
        """The numbers about outliers for the row of a finished step. Decides whether to replan for
        them.
        """
        if self._rectifier is None:
            return {}
        self._rectifier.told(seconds)
        found = self._decided(*self._rectifier.seen(number))
        if not found:
            return {}
        self._append(OUTLIERS, [one.to_json() for one in found])
        numbers = self._rectifier.numbers(found)
        return self._decided(numbers, self._rectifier.weigh(number, self._steps - number))

    def step(self, number: int):
        """The step function after step `number`, or None if it does not change."""
        if self._rectifier is None:
            return None
        return self._decided(*self._rectifier.ready(number, self._steps - number))

    def less(self, number: int, error: RuntimeError):
        """A step function that needs less memory, after a step ran out of memory. Raises the error,
        with advice, if there is none.
        """
        if self._rectifier is None:
            error.add_note("train: give it a rectifier, which then plans for less memory")
            raise error
        return self._decided(*self._rectifier.less(number, error))

    def notes(self) -> Mapping[str, Any] | None:
        """The values that a checkpoint stores about the rectifier."""
        return None if self._rectifier is None else self._rectifier.notes()

    def back(self, step: int, *, begins: bool) -> None:
        """Deletes the rows of the steps after `step`, which run again.

        begins: whether the process resumes a run. Otherwise the decisions remain in force, and
          their rows are kept.
        """
        for name in (OUTLIERS, DECISIONS) if begins else (OUTLIERS,):
            path = self._run.path / name
            if path.exists() and self._run.writes:
                with told(self._run.folder):
                    write_whole(path, lines_of(rows_until(path, step)[0]))

    def restore(self, step: int, notes: Mapping[str, Any] | None):
        """Resumes from the notes of a checkpoint. Returns the step function, or None for the step
        that `train` received.
        """
        if self._rectifier is None or notes is None:
            return None
        found = self._decided(*self._rectifier.restore(step, notes))
        if found is not None:
            self._run.plan(self._rectifier.plan)
        return found

    def close(self) -> None:
        if self._rectifier is not None:
            self._rectifier.close()

    def _decided(self, result: T, rows: list[dict[str, Any]]) -> T:
        """Writes the rows of decisions, and the plan after a swap. Returns `result`."""
        self._append(DECISIONS, rows)
        if self._rectifier is not None and any(row.get("event") == "swap" for row in rows):
            self._run.plan(self._rectifier.plan)
        return result

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows at the end of a file of the run."""
        path, lines = self._run.path / name, lines_of(rows)
        if lines:
            with told(self._run.folder), path.open("a", encoding="utf-8") as file:
                file.write(lines)
