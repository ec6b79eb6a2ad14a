"""A run's folder: `record`, `newest` and `best`.

The results of a run appear in the folder when the run ends. Until then, the folder is locked
against other runs.
"""

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Iterator

from jaxmem._target.processes.channel import joined
from jaxmem._target.processes.signals import Interrupted, raised
from jaxmem._train.checkpoints.checkpoints import (
    CHECKPOINTS,
    WRITING,
    Checkpoint,
    first_whole,
    is_name,
    noted,
    steps_in,
)
from jaxmem._train.checkpoints.manifest import NAME as MANIFEST
from jaxmem._train.checkpoints.manifest import is_stray
from jaxmem._train.runs.lock import locked, told
from jaxmem._train.runs.record import EVENTS, TENSORBOARD, Record, is_durable, tensorboardx
from jaxmem._train.runs.run import DECISIONS, EXPLAINED, METRICS, OUTLIERS, PLAN, SAMPLE, SUMMARY
from jaxmem.errors import RunError

REPORT = "report.html"
# The files of a run. Other files in the folder belong to the user. The summary is first, because
# its presence marks the folder of a run that has ended.
RESULTS = (SUMMARY, METRICS, PLAN, EXPLAINED, SAMPLE, DECISIONS, OUTLIERS, REPORT)
UNFINISHED, ENDED = "unfinished-", "ended-"
SHOWN = 30.0  # seconds until all processes see a new folder on a shared file system


def newest(folder: str | os.PathLike) -> Checkpoint:
    """Returns the newest complete checkpoint of a run.

        state = jaxmem.runs.newest("runs/mine").state(jax.eval_shape(first_state))

    A warning names each newer checkpoint that is not complete. The checkpoints are in
    `folder`/checkpoints for a run that has ended, and in the folder of the newest unfinished run
    otherwise.

    folder: the folder of the run.

    Raises RunError if the folder has no complete checkpoint.
    """
    parent = _checkpoints(folder)
    return _found(first_whole(parent, steps_in(parent)), folder, "no checkpoint")


def best(folder: str | os.PathLike, metric: str) -> Checkpoint:
    """Returns the complete checkpoint of a run with the least value of a metric.

    `train(..., best=metric)` keeps this checkpoint. `checkpoint.notes["best"][metric]` is its
    value.

    folder: the folder of the run.
    metric: the name of the metric.

    Raises RunError if no complete checkpoint has a value of the metric.
    """
    parent = _checkpoints(folder)
    steps = [step for _, step in noted(parent, metric)]
    return _found(first_whole(parent, steps), folder, f"no checkpoint with a value of {metric!r}")


def _checkpoints(folder: str | os.PathLike) -> pathlib.Path:
    """The folder of a run's checkpoints; in the unfinished run's folder until the run ends."""
    folder = _path(folder)
    ended = folder / CHECKPOINTS
    left = None if steps_in(ended) else _unfinished(folder)
    return ended if left is None else left / CHECKPOINTS


def _path(folder: str | os.PathLike) -> pathlib.Path:
    """The path of a run's folder. Raises RunError for anything but a path."""
    if not isinstance(folder, str | os.PathLike):
        raise RunError(f"runs: `folder` is {folder!r}; expected the path of a run's folder")
    return pathlib.Path(folder)


def _found(found: Checkpoint | None, folder: str | os.PathLike, what: str) -> Checkpoint:
    """The checkpoint. Raises RunError if there is none."""
    if found is None:
        raise RunError(
            f"checkpoints: {os.fspath(folder)!r} has {what} that is whole; expected the folder of a"
            " run that `train` was called in"
        )
    return found


@contextlib.contextmanager
def record(
    folder: str | os.PathLike,
    *,
    overwrite: bool = False,
    resume: bool = False,
    tensorboard: bool = False,
) -> Iterator[Record]:
    """Opens a run's folder, and gives the `with` statement a `Record` that writes the results.

        with jaxmem.runs.record("runs/mine") as run:
            run.plan(plan)
            for number in range(1, steps + 1):
                state, loss = plan.step(state, batch)
                run.row(number, loss=loss)
            run.summary({"val_loss": evaluate(state)})

    During the statement, the results are in `folder`/unfinished-DATE-TIME, and the results of an
    earlier run are unchanged. When the statement ends, the results are moved to `folder`. A
    KeyboardInterrupt also ends a run: its results are moved if they have a row or a summary. After
    any other error, the run has failed: `folder` is unchanged, the rows remain in the unfinished
    folder, and a note on the error names them. A process that is killed leaves the same files. If a
    run has rows and no summary, a summary with the number of rows is written.

    Arguments:
      folder: the folder for the results. The folder and its parents are made. Files that do not
        belong to a run are not changed, unless the run writes a result with the name of the file.
      overwrite: whether the results of an earlier run are deleted when this run ends.
      resume: whether to resume an unfinished run that left checkpoints, as `train` writes them, in
        `folder`. `Record.resumed` says whether there is such a run. An interrupted run with
        checkpoints is unfinished. With `overwrite`, its checkpoints are deleted, and the run begins
        again. With `resume`, SIGTERM ends the statement by `Interrupted`, as SIGINT ends it by
        KeyboardInterrupt.
      tensorboard: whether to write the rows for TensorBoard too, to the folder `tensorboard`.
        `tensorboard --logdir runs/mine` shows the rows during the run. This option needs
        `pip install 'jaxmem[tensorboard]'`.

    Several processes (`jax.distributed`) run the same statement with a folder that they share. The
    first process writes. In the other processes, calls that write do nothing.

    Raises RunError before the statement runs in these cases: `folder` has the summary of a run and
    `overwrite` is False, another run writes to `folder`, `folder` cannot be written, another
    process of the run does not see `folder`, or tensorboardX is missing for `tensorboard`.
    """
    if tensorboard:
        tensorboardx()
    folder, processes = _path(folder), joined()
    with contextlib.ExitStack() as held:

        def begin() -> tuple[str, bool]:
            """Makes and locks the folder until `held` ends. Returns the name of the run's folder in
            it, and whether the run resumes an unfinished run.
            """
            held.enter_context(_made(folder))
            held.enter_context(locked(folder))
            with told(folder):
                _finish(folder)
            _refuse_finished(folder, overwrite)
            for name in (CHECKPOINTS,) * resume + (TENSORBOARD,) * tensorboard:
                _refuse_foreign(folder / name)
            left = _unfinished(folder) if resume else None
            while left is not None and overwrite:  # otherwise the next run would resume it
                shutil.rmtree(left / CHECKPOINTS)
                left = _unfinished(folder)
            return (left or _apart(folder)).name, left is not None

        name, resumed = processes.first_does(begin)
        # Wherever the process goes meanwhile.
        path = (folder / name).absolute()
        run = Record(folder.absolute(), path, resumed, resume, tensorboard, processes)
        try:
            processes.agreed(lambda: _seen(path, folder))
            with raised() if resume else contextlib.nullcontext():
                yield run
        except BaseException as error:
            processes.leave(error)
            run._close()
            _tell_what_is_left(run, error)
            raise
        run._close()
        processes.first_does(lambda: _publish(run, interrupted=False))


def _seen(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Raises RunError if this process does not see the run's folder, which the first process made.
    A shared file system may show the folder a little later.
    """
    end = time.monotonic() + SHOWN
    while not path.is_dir():
        if time.monotonic() > end:
            raise RunError(
                f"record: {str(folder)!r} has no {path.name!r} here, which process 0 made there;"
                " expected a folder that all processes of the run share"
            )
        time.sleep(0.1)


def _tell_what_is_left(run: Record, error: BaseException) -> None:
    """Removes the run's folder if it is empty. Otherwise a note on the error names its files."""
    interrupted = isinstance(error, KeyboardInterrupt)
    if run.durable:
        error.add_note(f"the run goes on from its last checkpoint, in {run.path}")
    elif isinstance(error, Interrupted) or not run.writes:
        pass  # the run begins again when the statement runs again
    elif interrupted and (run.steps or (run.path / SUMMARY).exists()):
        _publish(run, interrupted=True)
    elif run.steps:
        error.add_note(f"rows until then are in {run.path / METRICS}")
    else:
        shutil.rmtree(run.path, ignore_errors=True)


def _publish(run: Record, interrupted: bool) -> None:
    """Removes the files of an earlier run, and moves the files of this run into the folder.

    The folder is renamed first. If the process is killed in between, the next run calls `_finish`.
    """
    with told(run.folder):
        if run.steps and not (run.path / SUMMARY).exists():
            run.summary({"steps": run.steps, "interrupted": interrupted})
        if not any(run.path.iterdir()):
            run.path.rmdir()
            return
        ended = run.path.with_name(ENDED + run.path.name.removeprefix(UNFINISHED))
        os.replace(run.path, ended)
        # Without the summary of an earlier run, files with these names belong to the user.
        for name in RESULTS if (run.folder / SUMMARY).exists() else ():
            if not (ended / name).exists():
                (run.folder / name).unlink(missing_ok=True)
        if not (ended / TENSORBOARD).exists() and _is_ours(run.folder / TENSORBOARD):
            shutil.rmtree(run.folder / TENSORBOARD)
        _finish(run.folder)


def _finish(folder: pathlib.Path) -> None:
    """Moves the results of runs that have ended into the folder."""
    for ended in sorted(folder.glob(f"{ENDED}*")):
        for name in (*RESULTS, CHECKPOINTS, TENSORBOARD):
            if (ended / name).exists():
                if name not in RESULTS and _is_ours(folder / name):
                    shutil.rmtree(folder / name)
                os.replace(ended / name, folder / name)
        if any(ended.iterdir()):  # a file of the user's own
            os.replace(ended, ended.with_name(UNFINISHED + ended.name.removeprefix(ENDED)))
        else:
            ended.rmdir()


def _is_ours(path: pathlib.Path) -> bool:
    """Whether a folder of checkpoints or events belongs to a run, and not to the user."""
    if path.is_symlink() or not path.is_dir():
        return False
    if path.name == TENSORBOARD:
        return all(p.name.startswith(EVENTS) or is_stray(p.name) for p in path.iterdir())
    names = (p for p in path.iterdir() if not is_stray(p.name))
    whole = [p for p in names if not p.name.startswith(WRITING)]
    # orbax's own managers name folders by steps too, so that names alone prove nothing.
    named = all(is_name(p.name) for p in whole)
    return named and (not whole or any((p / MANIFEST).exists() for p in whole))


def _refuse_foreign(path: pathlib.Path) -> None:
    """Raises RunError if a path for checkpoints or events holds other files."""
    if os.path.lexists(path) and not _is_ours(path):
        raise RunError(
            f"record: {str(path)!r} is not of a run, which would keep its {path.name} there; name"
            " another folder, or move it away"
        )


def _unfinished(folder: pathlib.Path) -> pathlib.Path | None:
    """The folder of the newest run that did not end and left checkpoints."""
    with told(folder):
        left = [path for path in folder.glob(f"{UNFINISHED}*") if is_durable(path)]
        return max(left, key=lambda path: path.name, default=None)


def _refuse_finished(folder: pathlib.Path, overwrite: bool) -> None:
    """Raises RunError if the folder holds a run's summary, which must not be replaced."""
    if (folder / SUMMARY).exists() and not overwrite:
        raise RunError(
            f"record: {str(folder)!r} holds the results of a run ({SUMMARY}); expected a folder"
            " without; name another one, or let them go: overwrite=True, --overwrite on a command"
            " line"
        )


def _apart(folder: pathlib.Path) -> pathlib.Path:
    """Makes a folder within `folder`, named after the time, for the results until the run ends.
    Removes empty folders of killed processes.
    """
    with told(folder):
        for old in folder.glob(f"{UNFINISHED}*"):
            with contextlib.suppress(OSError):  # it is not empty
                old.rmdir()
        name, number = f"{UNFINISHED}{time.strftime('%Y%m%d-%H%M%S')}", 1
        while True:
            path = folder / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1


@contextlib.contextmanager
def _made(folder: pathlib.Path) -> Iterator[None]:
    """Makes the folder and its parents. Removes at the end the made folders that are empty."""
    with told(folder):
        missing = [p.absolute() for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it holds something
                path.rmdir()
