"""Writes a run's rows, plan and summary during the run, and the rows for TensorBoard."""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxmem._core.files import write_json, write_whole
from jaxmem._core.warn import warn
from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.plan.plan import Plan
from jaxmem._target.processes.channel import Channel
from jaxmem._train.checkpoints.checkpoints import CHECKPOINTS, steps_in
from jaxmem._train.runs.lock import told
from jaxmem._train.runs.run import EXPLAINED, METRICS, PLAN, SAMPLE, SUMMARY
from jaxmem.errors import RunError

TENSORBOARD = "tensorboard"  # a folder
EVENTS = "events.out.tfevents."  # the beginning of the names of its files
SHOWN_EVERY = 10  # seconds until TensorBoard can see a row


class Record:
    """Writes the results of a run. `jaxmem.runs.record` makes a record.

    folder: the folder in which the results appear when the run ends.
    path: the folder, inside `folder`, that has the results until then, and keeps them if the run
      fails.
    steps: number of rows that were written.
    resumed: whether this run resumes an unfinished run that left checkpoints.
    resumes: whether the run can be resumed if it does not end.
    kept: the rows that a resumed run had when its checkpoint was saved.
    processes: the processes of the run. Only the first process writes.
    writes: whether this process writes.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        path: pathlib.Path,
        resumed: bool = False,
        resumes: bool = False,
        tensorboard: bool = False,
        processes: Channel | None = None,
    ):
        self.folder, self.path, self.resumed, self.resumes = folder, path, resumed, resumes
        self.processes = processes or Channel()
        self.writes = self.processes.first
        self.steps = 0
        self.kept: list[dict[str, Any]] = []
        self.trained = False  # whether `train` was called with it
        self._rows = None
        self._events = Events(path / TENSORBOARD) if tensorboard and self.writes else None

    @property
    def durable(self) -> bool:
        """Whether the run has checkpoints, from which an unfinished run resumes."""
        return is_durable(self.path)

    def rows_until(self, step: int) -> list[dict[str, float | None]]:
        """Returns the rows of the steps up to `step`, and deletes the other rows.

        Rows of later steps, and an unfinished last row, are deleted.

        The next row is written after these rows. A warning names other lines that are not rows, and
        a warning has the number of missing rows.
        """
        self._close()
        path = self.path / METRICS
        with told(self.folder):
            rows, others = rows_until(path, step)
            missing = step - len({row["step"] for row in rows}) - len(others)
            if self.writes:
                where = str(self.folder / path.parent.name / METRICS)
                if missing > 0:
                    warn(f"record: {where!r} lacks {missing} of the rows of steps 1 to {step}")
                for at in others:
                    warn(f"record: line {at} of {where!r} is no row of a step, and is let go")
                write_whole(path, lines_of(rows))
            self.steps = len(rows)
            if self._events is not None:
                self._events.go(step, rows)
        return rows

    def flush(self) -> None:
        """Flushes the rows to the disk."""
        if self._rows is not None:
            with told(self.folder):
                self._rows.flush()
                os.fsync(self._rows.fileno())
                if self._events is not None:
                    self._events.flush()

    def row(self, step: int, /, **numbers: float) -> None:
        """Appends the numbers of one step to metrics.jsonl.

        The row is written at once, so that it survives a crash.

        Arguments:
          step: the number of the step, which is the horizontal axis of the page.
          numbers: scalars of Python, NumPy or JAX by name, such as loss=5.5. A number that is not
            finite is written as null. The page shows `loss`, and `step_seconds`, the seconds of the
            step.

        Raises RunError if the row cannot be written.
        """
        row = {"step": int(step)} | {name: float(value) for name, value in numbers.items()}
        row["step"] = int(step)  # also where a metric has that name
        if self.writes:
            with told(self.folder):
                if self._rows is None:
                    self._rows = (self.path / METRICS).open("a", encoding="utf-8")
                self._rows.write(lines_of([row]))
                self._rows.flush()
                if self._events is not None:
                    self._events.write(row)
        self.steps += 1

    def plan(self, plan: Plan) -> None:
        """Writes the plan of the run to plan.json."""
        self._write(PLAN, write_json, plan.to_json())

    def explained(self, found: Explanation) -> None:
        """Writes the explanation of the step to explained.json.

        The page then shows the bytes in use over the step's schedule.

        found: the result of `jaxmem.explain`.
        """
        self._write(EXPLAINED, write_json, found.to_json())

    def sample(self, text: str) -> None:
        """Writes a text that the trained model generated to sample.txt."""
        self._write(SAMPLE, write_whole, text)

    def summary(self, fields: Mapping[str, Any]) -> None:
        """Writes the summary of the whole run to summary.json.

        Arguments:
          fields: values that JSON supports, and scalars of NumPy and JAX, by name. `jaxmem report`
            shows `config` (the run's name), `command`, `val_loss`, `first_loss`, `final_loss`,
            `steps`, `compiled_bytes`, `baseline_bytes`, `peak_bytes` and `tokens_per_second`.
        """
        self._write(SUMMARY, write_json, _without_nan(dict(fields)))

    def _write(self, name: str, write: Callable[[pathlib.Path, Any], None], content: Any) -> None:
        """Writes a file of the run, in the first process alone."""
        if self.writes:
            with told(self.folder):
                write(self.path / name, content)

    def _close(self) -> None:
        """Closes the files of the record."""
        for file in (self._rows, self._events):
            if file is not None:
                with contextlib.suppress(OSError):  # `row` has raised the error
                    file.close()
        self._rows = None


class Events:
    """Writes rows as TensorBoard reads them, in a new file of `folder` each time that the run
    resumes.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._module, self._file, self._purge, self._flushed = tensorboardx(), None, 0, 0.0

    def go(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Discards the rows after a step.

        rows: the rows up to the step, which are written if the folder has no files.
        """
        self.close()
        self._purge = step + 1
        if not any(self.folder.glob("*")):
            for row in rows:
                self.write(row)

    def write(self, row: Mapping[str, Any]) -> None:
        event = self._module.proto.event_pb2.Event(wall_time=time.time(), step=row["step"])
        for name, value in row.items():
            if name != "step" and value is not None:
                event.summary.MergeFrom(self._module.summary.scalar(name, value))
        self._opened().write_event(event)
        if time.monotonic() - self._flushed > SHOWN_EVERY:
            self.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self):
        """TensorBoard's file, which is made at the first row."""
        if self._file is None:
            self.folder.mkdir(exist_ok=True)
            number = sum(1 for _ in self.folder.glob(f"{EVENTS}*"))  # two may begin in one second
            writer = self._module.event_file_writer.EventsWriter
            self._file = writer(str(self.folder / "events"), f".{number:06d}")
            if number:  # TensorBoard forgets the rows of these steps in earlier files
                event_pb2 = self._module.proto.event_pb2
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._file.write_event(event_pb2.Event(step=self._purge, session_log=start))
        return self._file


def tensorboardx():
    """The package tensorboardX. If it is missing, raises RunError with the installing command."""
    try:
        import tensorboardX
        import tensorboardX.event_file_writer
        import tensorboardX.proto.event_pb2
        import tensorboardX.summary
    except ImportError as error:
        raise RunError(
            f"record: rows for TensorBoard are written by tensorboardX, which cannot be imported"
            f" ({error}); install it: pip install 'jaxmem[tensorboard]'"
        ) from error
    return tensorboardX


def is_durable(path: pathlib.Path) -> bool:
    """Whether a run's folder has checkpoints."""
    return bool(steps_in(path / CHECKPOINTS))


def rows_until(path: pathlib.Path, step: int) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of the steps up to `step` in a file that may be missing, and the numbers of the
    lines that are no rows. An unfinished last line is ignored.
    """
    rows, others = [], []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            others += [number] if line.endswith(b"\n") else []
        elif row["step"] <= step:
            rows.append(row)
    return rows, others


def lines_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """The lines of a file of rows."""
    return "".join(json.dumps(_without_nan(row), allow_nan=False) + "\n" for row in rows)


def _without_nan(value: Any) -> Any:
    """`value` with scalars of NumPy and JAX as Python's numbers, and with null for numbers that
    JSON cannot represent.
    """
    value = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(value, Mapping):
        return {str(key): _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
