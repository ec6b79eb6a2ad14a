"""A run's checkpoints: a folder for each saved step. The newest few are kept. orbax writes them
during training. A checkpoint is complete once its manifest is on the disk.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxmem._core.files import flush_folder
from jaxmem._core.warn import warn
from jaxmem._target.processes.channel import Channel
from jaxmem._train.checkpoints import manifest, restacked, stored
from jaxmem.errors import RunError

CHECKPOINTS = "checkpoints"  # of a run's folder
WRITING = ".writing-"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a run.

    step: number of finished steps.
    notes: values that were stored with the state: the `settings`, the `position` of the data, the
      steps that were `skipped`, and under `best` the name and the value of the followed metric.
    path: the folder of the checkpoint.
    """

    step: int
    notes: Mapping[str, Any]
    path: pathlib.Path
    _leaves: tuple[manifest.Leaf, ...]

    def state(self, like):
        """Reads the state, as a tree like `like`.

        like: a state, or its shapes. Each array of the result is placed on the devices and in the
          memory of the array in `like`, or of the sharding of its `jax.ShapeDtypeStruct`.

        Raises RunError if `like` has another tree; the message names an array.
        """
        leaves, structure = jax.tree.flatten_with_path(like)
        return structure.unflatten(self.leaves(leaves))

    def leaves(self, like: Sequence[tuple[Any, Any]]) -> list:
        """Reads the leaves of the state.

        like: pairs of a path and a leaf, as `jax.tree.flatten_with_path` returns them. Each array
          is placed like its leaf.

        Raises RunError if `like` belongs to another state.
        """
        return restacked.read(self.path, self._leaves, like)


class Checkpoints:
    """`with Checkpoints(folder, keep) as checkpoints: checkpoints.save(step, state, notes)`.

    folder: the folder of the checkpoints. It is made.
    keep: number of checkpoints that are kept, the newest. With 1, the checkpoint before the newest
      remains until `sound` is called, because the last update before the newest checkpoint may have
      damaged its state.
    best: the name of a metric. The checkpoint whose notes have the least value of the metric is
      kept in addition.
    processes: the processes of the run. Each process stores the arrays on its devices, and all call
      the same methods in the same order. An error in one process raises RunError in all. The first
      process does all other work.

    A saved checkpoint is on the disk once `wait`, or the next `save`, returns. If the checkpoint
    could not be written, both raise RunError, which names the newest complete checkpoint.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int,
        best: str | None = None,
        processes: Channel | None = None,
    ):
        self.folder, self.keep, self.best = folder.absolute(), keep, best
        self._processes = processes or Channel()
        self._writing = self._processes.beside("writing")  # for the thread that writes
        self.whole: int | None = None  # the newest step that is on the disk
        self.at: int | None = None  # the step that was saved last, or gone back to
        self._pending: list[concurrent.futures.Future] = []
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxmem-checkpoint")
        self._writer = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _, error: BaseException | None, *__) -> None:
        if error is not None:
            self._writing.hurry()  # another process may have ended
        # What is being written is finished, whatever ends the run.
        self._thread.shutdown(wait=True)
        if self._writer is not None:
            self._writer.close()

    def save(self, step: int, state, notes: Mapping[str, Any]) -> None:
        """Writes a checkpoint. Returns once the arrays are copied: the next step may then consume
        them.
        """
        self.wait()
        path = self.folder / f"{WRITING}{step:08d}"
        arrays, leaves = stored.taken(state)
        if self._writer is None:
            self._writer = stored.writer(self._writing)
        with _told(self):
            self._processes.first_does(lambda: self._make_room(path))
        failed = None
        try:
            stored.write(self._writer, path, arrays)
        except Exception as error:  # the thread reports it to the other processes
            failed = error
        self.at = step
        finish = self._thread.submit(self._finish, path, step, leaves, dict(notes), failed)
        self._pending = [finish]

    def _make_room(self, path: pathlib.Path) -> None:
        """Makes the folder of a new checkpoint, and removes checkpoints that are not needed."""
        for left in self.folder.glob(f"{WRITING}*"):  # by a process that was killed
            shutil.rmtree(left)
        # Checkpoints after the resumed checkpoint hold steps that run again.
        for later in steps_in(self.folder):
            if self.at is None or later > self.at:
                _remove(step_folder(self.folder, later))
        self._prune(max(self.keep, 2))  # a run may go on with fewer than it had
        path.mkdir(parents=True)

    def _finish(self, path: pathlib.Path, step: int, leaves, notes, failed) -> None:
        """Ends a save in all processes: waits for orbax, and gives the checkpoint its manifest."""
        self._writing.agreed(lambda: self._written(failed))
        # One process lists the files, since others may see a folder later; all sum up a part.
        names = self._writing.first_does(lambda: manifest.names(path))
        sums = self._writing.agreed(lambda: self._summed(path, names))
        files = {name: pair for found in sums for name, pair in found.items()}
        self._writing.first_does(lambda: self._name(path, step, leaves, notes, files))
        self.whole = step

    def _written(self, failed: Exception | None) -> None:
        """Waits until orbax has written this process's part; raises the error `failed` if given."""
        with _told(self):
            if failed is not None:
                raise failed
            assert self._writer is not None
            self._writer.wait_until_finished()

    def _summed(self, path: pathlib.Path, names: list[str]) -> dict[str, tuple[int, str]]:
        """The size and digest of each of this process's share of the files."""
        with _told(self):
            return manifest.summed(path, names[self._writing.index :: self._writing.count])

    def _name(self, path: pathlib.Path, step: int, leaves, notes, files) -> None:
        """Writes the manifest of a checkpoint, and renames its folder, which makes it a checkpoint:
        a folder of that name without a manifest is damaged.
        """
        with _told(self):
            manifest.write(path, manifest.Manifest(step, leaves, notes, files))
            whole = step_folder(self.folder, step)
            if whole.exists():  # which was not used, as it was changed
                _remove(whole)
            os.replace(path, whole)
            flush_folder(self.folder)
            self._prune(max(self.keep, 2))

    def sound(self, step: int) -> None:
        """Records that the step after checkpoint `step` gave finite metrics."""
        if not self._processes.first:
            return
        if self.keep == 1 and step == self.at and len(self._pending) < 2:
            self._pending.append(self._thread.submit(self._prune, 1))

    def _prune(self, keep: int) -> None:
        """Removes all but the newest `keep` checkpoints and the best one."""
        best = [step for _, step in noted(self.folder, self.best)[:1]]
        for old in steps_in(self.folder)[keep:]:
            if old not in best:
                _remove(step_folder(self.folder, old))

    def wait(self) -> None:
        """Waits until the saved checkpoints are on the disk."""
        pending, self._pending = self._pending, []
        with _told(self):
            for one in pending:
                one.result()

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint. A warning names the fault of each newer one.

        Raises RunError if there are checkpoints, and none is complete.
        """
        self.wait()
        return self._go(self._newest)

    def _newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; see `newest`."""
        steps = steps_in(self.folder)
        found = first_whole(self.folder, steps)
        if steps and found is None:
            raise RunError(
                f"train: {str(self.folder)!r} holds {len(steps)} checkpoints, and none of them is"
                " whole; expected one; remove the folder to begin again"
            )
        return found

    def before(self, step: int) -> Checkpoint | None:
        """The newest complete checkpoint of this run before a step; None if there is none."""
        self.wait()
        past = step - 1 if self.at is None else min(step - 1, self.at)
        steps = lambda: [one for one in steps_in(self.folder) if one <= past]
        return self._go(lambda: first_whole(self.folder, steps()))

    def least(self, step: int) -> float:
        """The least value of the metric `best` in the checkpoints up to a step."""
        values = lambda: (value for value, of in noted(self.folder, self.best) if of <= step)
        return self._processes.first_does(lambda: next(values(), math.inf))

    def _go(self, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """Returns to the checkpoint that the first process finds; the other processes do not verify
        it again.
        """
        step = self._processes.first_does(lambda: None if (it := find()) is None else it.step)
        if step is None:
            return None
        found = self._processes.each(lambda: _opened(self.folder, step))
        self.whole = self.at = step
        return found


def _opened(folder: pathlib.Path, step: int) -> Checkpoint:
    """Reads a checkpoint that another process has verified."""
    path = step_folder(folder, step)
    try:
        return _read(path, manifest.open_manifest(path, step))
    except (ValueError, OSError) as error:
        raise RunError(
            f"train: cannot read the checkpoint {str(path)!r}: {error}; expected a folder that all"
            " processes of the run share"
        ) from error


def first_whole(folder: pathlib.Path, steps: Sequence[int]) -> Checkpoint | None:
    """The first complete checkpoint of these steps. A warning names the fault of each one before
    it.
    """
    for step in steps:
        path = step_folder(folder, step)
        try:
            return _read(path, manifest.verified(path, step))
        except (ValueError, OSError) as error:
            warn(f"train: the checkpoint {str(path)!r} is not used: {error}")
    return None


def _read(path: pathlib.Path, found: manifest.Manifest) -> Checkpoint:
    """A checkpoint as its manifest describes it."""
    return Checkpoint(found.step, found.notes, path, found.leaves)


def noted(folder: pathlib.Path, metric: str | None) -> list[tuple[float, int]]:
    """The values of a metric that checkpoints store, with their steps; the least value first."""
    notes = ((step, manifest.notes(step_folder(folder, step), step)) for step in steps_in(folder))
    of = ((step, found["best"]) for step, found in notes if metric is not None and "best" in found)
    return sorted((best[metric], step) for step, best in of if metric in best)


@contextlib.contextmanager
def _told(of: Checkpoints) -> Iterator[None]:
    """Raises RunError for any error of a write."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds
        whole = "none is whole" if of.whole is None else f"that of step {of.whole} is whole"
        raise RunError(
            f"train: cannot write a checkpoint to {str(of.folder)!r}: {error}; expected room in a"
            f" folder that can be written to; of the earlier ones {whole}"
        ) from error


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps that have a folder, the newest first."""
    names = (path.name for path in folder.glob("*")) if folder.is_dir() else ()
    return sorted((int(name) for name in names if is_name(name)), reverse=True)


def step_folder(folder: pathlib.Path, step: int) -> pathlib.Path:
    """The folder of the checkpoint of a step."""
    return folder / f"{step:08d}"


def is_name(name: str) -> bool:
    """Whether a name is the name of a checkpoint's folder."""
    return name.isdecimal() and name == f"{int(name):08d}"


def _remove(path: pathlib.Path) -> None:
    """Removes a checkpoint, its manifest first: without it, the rest of an interrupted removal is
    no checkpoint.
    """
    (path / manifest.NAME).unlink(missing_ok=True)
    shutil.rmtree(path)
