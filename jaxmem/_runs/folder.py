"""A run's folder while the run writes it: the results appear when the run ends, and the folder is
held against other runs until then.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmem._core.files import write_json
from jaxmem._memory.explanation import Explanation
from jaxmem._plan.plan import Plan
from jaxmem._runs.read import EXPLAINED, METRICS, PLAN, SUMMARY
from jaxmem.errors import JaxmemWarning, RunError

REPORT = "report.html"
# What belongs to one run; other files in the folder are the user's. The summary is first, since its
# presence marks the folder as a run's.
RESULTS = (SUMMARY, METRICS, PLAN, EXPLAINED, REPORT)
LOCK, UNFINISHED = ".lock", "unfinished-"


class Record:
    """Writes down a run's results, as `jaxmem.runs.record` makes it.

    folder: where the results appear at the run's end.
    path: the folder within it where they are until then, and where they stay if the run fails.
    steps: how many rows were written.
    """

    def __init__(self, folder: pathlib.Path, path: pathlib.Path):
        self.folder, self.path = folder, path
        self.steps = 0
        self._rows = None

    def row(self, step: int, /, **numbers: float) -> None:
        """Appends a step's numbers to metrics.jsonl, at once, so that they survive a crash.

        Arguments:
          step: the step's number, which is the page's horizontal axis.
          numbers: scalars by name, such as loss=5.5, Python's, NumPy's or JAX's; what is not
            finite is written as null. The page shows `loss` and `step_seconds`, what a step took.

        Raises RunError if it cannot be written.
        """
        row = {"step": int(step)} | {name: float(value) for name, value in numbers.items()}
        with _told(self.folder):
            if self._rows is None:
                self._rows = (self.path / METRICS).open("w", encoding="utf-8")
            self._rows.write(json.dumps(_without_nan(row), allow_nan=False) + "\n")
            self._rows.flush()
        self.steps += 1

    def plan(self, plan: Plan) -> None:
        """Writes the plan under which the run trains, as plan.json."""
        with _told(self.folder):
            plan.save(self.path / PLAN)

    def explained(self, found: Explanation) -> None:
        """Writes what `jaxmem.explain` told of the step, as explained.json: the page then shows
        what is in memory over the step's schedule.
        """
        with _told(self.folder):
            write_json(self.path / EXPLAINED, found.to_json())

    def summary(self, fields: Mapping[str, Any]) -> None:
        """Writes what is to be said of the whole run, as summary.json.

        Arguments:
          fields: anything that JSON has a word for. `jaxmem report` shows `config` (the run's
            name), `command`, `val_loss`, `first_loss`, `final_loss`, `steps`, `compiled_bytes`,
            `baseline_bytes` and `tokens_per_second`.
        """
        with _told(self.folder):
            write_json(self.path / SUMMARY, _without_nan(dict(fields)))

    def _close(self) -> None:
        if self._rows is not None:
            self._rows.close()


@contextlib.contextmanager
def record(folder: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Record]:
    """A run's results, written apart while the statement runs, in `folder` when it has ended.

        with jaxmem.runs.record("runs/mine") as run:
            run.plan(plan)
            for number in range(1, steps + 1):
                state, loss = plan.step(state, batch)
                run.row(number, loss=loss)
            run.summary({"val_loss": evaluate(state)})

    Until then they are in `folder`/unfinished-DATE-TIME, and an earlier run's stay as they are. A
    statement that a KeyboardInterrupt ends has ended too: what it wrote appears, if it has a row or
    a summary. One that ends by another error has failed: `folder` stays as it was, rows stay in the
    folder of the unfinished, and a note on the error says so. A process that is killed leaves the
    same. Rows without a summary get one, of their number.

    Arguments:
      folder: where the results belong; it is made, with its parents. Files in it that are not a
        run's are left alone.
      overwrite: let the results of an earlier run go, when this one ends.

    Raises RunError, before the statement runs, if `folder` holds a run's summary and `overwrite`
    is not set, if another process writes a run there, or if it cannot be written to.
    """
    folder = pathlib.Path(folder)
    with _made(folder), _locked(folder):
        _refuse_finished(folder, overwrite)
        run = Record(folder, _apart(folder))
        try:
            yield run
        except BaseException as error:
            run._close()
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted and (run.steps or (run.path / SUMMARY).exists()):
                _publish(run, interrupted=True)
            elif run.steps:
                error.add_note(f"rows until then are in {run.path / METRICS}")
            else:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        run._close()
        _publish(run, interrupted=False)


def _publish(run: Record, interrupted: bool) -> None:
    """Lets an earlier run's files go, and moves this one's to their place.

    The summary moves first. A process killed in between leaves a folder that is taken for a run's,
    which no other run replaces unasked, and the rest in the folder of the unfinished.
    """
    with _told(run.folder):
        if run.steps and not (run.path / SUMMARY).exists():
            run.summary({"steps": run.steps, "interrupted": interrupted})
        if any(run.path.iterdir()):
            for name in RESULTS:
                (run.folder / name).unlink(missing_ok=True)
            for name in RESULTS:
                if (run.path / name).exists():
                    os.replace(run.path / name, run.folder / name)
        with contextlib.suppress(OSError):  # a file of the user's own may be in it
            run.path.rmdir()


def _refuse_finished(folder: pathlib.Path, overwrite: bool) -> None:
    """Raises RunError if the folder holds a run's summary, which must not be replaced."""
    if (folder / SUMMARY).exists() and not overwrite:
        raise RunError(
            f"record: {str(folder)!r} holds the results of a run ({SUMMARY}); expected a folder"
            " without; name another one, or let them go: overwrite=True, --overwrite on a command"
            " line"
        )


def _apart(folder: pathlib.Path) -> pathlib.Path:
    """Makes a folder within `folder`, named after the time, where the results wait. Those that
    killed processes left empty are removed.
    """
    with _told(folder):
        for old in folder.glob(f"{UNFINISHED}*"):
            with contextlib.suppress(OSError):  # it is not empty
                old.rmdir()
        name, number = f"{UNFINISHED}{time.strftime('%Y%m%d-%H%M%S')}", 1
        while True:
            path = folder / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
            else:
                return path


@contextlib.contextmanager
def _made(folder: pathlib.Path) -> Iterator[None]:
    """Makes the folder and its parents; those made that are empty at the end are removed."""
    with _told(folder):
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it holds something
                path.rmdir()


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds the folder against other processes. The lock is the system's: it ends with the process
    that holds it, however that ends. Where there are no locks, a warning says so.
    """
    # Whoever holds the lock removes its file at the end. So a file may be locked here that has no
    # name any more, and would not keep out the next run: then the lock is taken anew.
    lock = folder / LOCK
    while True:
        with _told(folder):
            file = lock.open("a+", encoding="utf-8")
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)  # it was opened to append, at its end
            holder = file.read().strip() or "it has just begun"
            file.close()
            raise RunError(
                f"record: another run is writing to {str(folder)!r} ({holder}); wait for it, or"
                " name another folder"
            ) from None
        except (OSError, ImportError) as error:  # some network file systems have no locks
            warnings.warn(
                f"record: {str(folder)!r} cannot be locked ({error}); do not write two runs there"
                " at once",
                JaxmemWarning,
                stacklevel=4,
            )
        if _is(lock, file.fileno()):
            break
        file.close()  # who held it has removed it in the meantime
    try:
        with _told(folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        file.close()


def _is(path: pathlib.Path, descriptor: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _told(folder: pathlib.Path) -> Iterator[None]:
    """Makes an OSError of the statement a RunError that names the folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"record: cannot write to {str(folder)!r}: {error}; expected a folder, or a path where"
            " one can be made and written to"
        ) from error


def _without_nan(value: Any) -> Any:
    """`value` with null for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
