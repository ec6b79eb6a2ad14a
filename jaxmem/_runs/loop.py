"""A training loop that loses nothing: it saves as it goes, goes on where it stopped, ends when it
is asked to, and goes back where a loss is not finite.
"""

import collections
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmem._core.warn import warn
from jaxmem._outliers.rectify import Rectifier
from jaxmem._processes.pace import Pace
from jaxmem._processes.signals import Interrupted, held
from jaxmem._runs.checkpoints import CHECKPOINTS, Checkpoint, Checkpoints
from jaxmem._runs.positions import Data, as_json, check_settings
from jaxmem._runs.record import Record
from jaxmem._runs.revised import Revised, is_out_of_memory
from jaxmem._runs.rows import Best, Measured, numbers
from jaxmem._runs.skips import NotFinite, attempt, watch
from jaxmem._runs.stored import shape
from jaxmem.errors import NotFiniteError, RunError


def train(
    step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]],
    state: Any,
    data: Any,
    *,
    steps: int,
    run: Record,
    save_every: float = 60.0,
    keep: int = 2,
    best: str | None = None,
    not_finite: int = 3,
    settings: Mapping[str, Any] | None = None,
    units: Mapping[str, float] | None = None,
    each: Callable[[int, Mapping[str, float | None]], None] | None = None,
    rectifier: Rectifier | None = None,
) -> Any:
    """The state after `steps` steps, of which each has a row in the run's folder: its metrics, the
    `step_seconds` that it took, and `peak_bytes` where devices tell.

        with jaxmem.runs.record("runs/mine", resume=True) as run:
            state = jaxmem.runs.train(plan.step, init, batch_of, steps=1000, run=run)

    Checkpoints lie beside the rows. If the process ends, whether by a signal, an error or the
    machine's end, the same lines go on from the newest checkpoint: with losses and a state that
    are, bit for bit, those of a run that was not stopped. SIGTERM and SIGINT are noted, and end the
    run after the step, once it is saved, by `Interrupted`.

    A checkpoint is whole once its manifest is on the disk, with the SHA-256 sums of its files. One
    whose files are others is not used, which a warning says, but the one before.

    Arguments:
      step: `step(state, batch) -> (state, metrics)`, which may donate the state. Of `metrics` what
        are scalars make the row; they are read one step behind, so that the device need not wait.
      state: the first one, or a function that makes it, whose arrays are let go where the run goes
        on; the state then has the same tree, and lies where the first one does.
      data: a function of the step's number, from 1 on, that makes its batch; or an iterator whose
        get_state() and set_state() tell and set its position, such as grain's.
      steps: how many there are in all.
      run: what `record` gave, with `resume=True`.
      save_every: seconds between two checkpoints; one more is made at the beginning, and one at
        the end. They are written while training goes on.
      keep: how many are kept, at least 1. Of a single one, the one before stays until a step after
        it had finite metrics.
      best: a metric; the checkpoint with its least value is kept beside those. That of a checkpoint
        is in the row of its step; one whose row has none is never the best. After a step that has
        it while the step before had none the run saves at once, if it is the least so far.
      not_finite: where `loss` or `grad_norm` is not finite, the run goes back to the newest
        checkpoint, and leaves that step's batch out from then on; its row says `skipped`. Where as
        many in a row do not help, the step before them is left out in their place, from a
        checkpoint before it, which is done one time less than this; after that the run ends.
      settings: what must be the same when the run goes on, as JSON.
      units: how many a step has of what, such as `{"tokens": 4096}`, which gives the rows
        `tokens_per_second`.
      each: `each(step, row)` is called with each row as it is written; again for a step that is
        done again. `run.kept` has those of the steps that were done before.
      rectifier: revises the plan that `step` is of while the model trains, and plans for less where
        a step runs out of memory.

    Raises RunError for arguments that cannot be meant, where the checkpoints are of other settings
    or another state, where none is whole, or where one cannot be written; NotFiniteError where
    losses are not finite; Interrupted where a signal ended it.
    """
    if keep < 1 or not_finite < 1 or not save_every >= 0:
        raise RunError(
            f"train: got keep={keep}, not_finite={not_finite}, save_every={save_every}; expected at"
            " least 1, 1 and 0 seconds"
        )
    if rectifier is not None and not run.processes.alone:
        raise RunError(
            f"train: got a rectifier in {run.processes.count} processes, which would decide apart;"
            " expected one process, over any number of its devices"
        )
    if not run.resumes or run.trained:
        raise RunError(
            "train: `run` "
            + ("has been trained in already" if run.trained else "does not go on with earlier ones")
            + "; expected a record for this training alone: jaxmem.runs.record(folder, resume=True)"
        )
    run.trained = True
    lasting = as_json(dict(settings or {}), "`settings` is")
    with held() as asked:
        pace = Pace(run.processes, asked, save_every)
        with Checkpoints(run.path / CHECKPOINTS, keep, best, run.processes) as checkpoints:
            measured, revised = Measured(units or {}), Revised(rectifier, run, steps)
            batches = Data(data, run.processes)
            loop = _Loop(step, batches, run, checkpoints, lasting, measured, revised, each, pace)
            # A function, and no tree that can be called, such as a model.
            is_function = callable(state) and jax.tree_util.all_leaves([state])
            try:
                loop.start(state() if is_function else state, steps, owned=is_function)
                del state
                loop.go_on(steps, not_finite)
            finally:
                revised.close()
        if pace.ended is not None:
            raise Interrupted(f"the run was asked to end after step {loop.done}", pace.ended)
        if best is not None and loop.best.least == math.inf:
            warn(
                f"train: `best` is {best!r}, and no checkpoint's row has a finite number of that"
                " name; expected one of the step's metrics"
            )
        return loop.state


class _Loop:
    """A run while it goes on: `state` is that after step `done`; `skipped` were left out."""

    def __init__(
        self,
        step,
        data: Data,
        run: Record,
        checkpoints: Checkpoints,
        settings,
        measured: Measured,
        revised: Revised,
        each,
        pace: Pace,
    ):
        self.step, self.data, self.run, self.checkpoints = step, data, run, checkpoints
        self.best, self.revised = Best(checkpoints.best), revised
        self.settings, self.measured, self.each, self.pace = settings, measured, each, pace
        self.state: Any = None
        self.done, self.skipped = 0, []
        self._waiting: collections.deque = collections.deque()
        self._causes: set[int] = set()  # steps left out for what came after them

    def start(self, state, steps: int, owned: bool) -> None:
        """Begins with a state, or goes on from the newest checkpoint, in its place. `owned`: nobody
        else has the state's arrays.
        """
        leaves, self._structure = jax.tree.flatten_with_path(state)
        if not any(getattr(leaf, "size", 1) for _, leaf in leaves):
            raise RunError("train: `state` holds no array with a value; expected what is trained")
        self._like, self.state = [(path, shape(leaf)) for path, leaf in leaves], state
        found = self.checkpoints.newest()
        if found is None or not found.step:  # nothing was done, so that it may begin otherwise
            self.run.rows_until(0)
            self.revised.back(0, None)
            self._checkpoint()  # for a loss that is not finite before the first save
            return
        check_settings(found.notes["settings"], self.settings, self.run.folder)
        if found.step > steps:
            raise RunError(
                f"train: the checkpoint is of step {found.step}, and `steps` is {steps}; expected"
                " as many at least, or another folder"
            )
        # Only one of the two states is held: the first one is let go before the other is read.
        for _, leaf in leaves if owned else ():
            if isinstance(leaf, jax.Array):
                leaf.delete()
        del state, leaves
        self.run.kept = self._back(found)
        self.step = self.revised.back(found.step, found.notes.get("rectifier")) or self.step

    def _back(self, to: Checkpoint) -> list[dict[str, float | None]]:
        """Goes to a checkpoint, and returns the rows until then."""
        self.state = None
        self.state = self._structure.unflatten(to.leaves(self._like))
        self.done, self.skipped = to.step, list(to.notes["skipped"])
        self.data.go(to.notes["position"])
        self._waiting.clear()
        self.measured.begin()
        self.best.begin(self.checkpoints.least(to.step))
        return self.run.rows_until(to.step)

    def go_on(self, steps: int, not_finite: int) -> None:
        self.pace.saved()
        self.pace.agree(self.done)
        while True:
            try:
                while self.done < steps and self.pace.ended is None:
                    self._one()
                    if self.best.rare:
                        self._read(0)
                    due = self.pace.due(self.done) or self.best.is_least
                    due = due and self.done < steps
                    # Not after a step that was left out: what made it so may be in the state.
                    if due and self.done not in self.skipped:
                        self._save()
                        self.pace.saved()
                self._save()
                if self.done == steps:
                    self.checkpoints.sound(steps)  # no step comes that would say so
                self.checkpoints.wait()
                self.pace.agree(self.done)
            except NotFinite as found:
                self._leave_out(found, not_finite)
            except jax.errors.JaxRuntimeError as error:
                if not (is_out_of_memory(error) and self.run.processes.alone):
                    raise
                self._take_less(error)
            except KeyboardInterrupt:
                with contextlib.suppress(NotFinite):
                    self._read(0)  # of the steps that were done
                raise
            else:
                break

    def _one(self) -> None:
        number = self.done + 1
        batch = self.data(number)
        if number in self.skipped:
            self._read(0)
            self._write(number, {"skipped": 1.0})
        else:
            self.revised.look(number, self.state, batch)
            self.state, metrics = self.step(self.state, batch)
            self.best.done(metrics)
            self._waiting.append((number, metrics))
            self._read(1)
            self.step = self.revised.step(number) or self.step
        self.done = number

    def _read(self, behind: int) -> None:
        """Reads the metrics of all steps but the last `behind`, which waits for them."""
        while len(self._waiting) > behind:
            number, metrics = self._waiting[0]
            row = numbers(metrics)
            watch(number, row)
            self._waiting.popleft()
            self.checkpoints.sound(number - 1)
            row |= self.measured(number)
            self._write(number, row | self.revised.row(number, row.get("step_seconds")))

    def _write(self, number: int, row: Mapping[str, float]) -> None:
        self.best.read(row)
        self.run.row(number, **row)
        if self.each is not None:
            self.each(number, row)

    def _save(self) -> None:
        """Saves the state, once the rows of all steps before it are on the disk."""
        self._read(0)
        self.run.flush()
        if self.checkpoints.at != self.done:
            self._checkpoint()

    def _checkpoint(self) -> None:
        notes = {
            "settings": self.settings,
            "position": self.data.position,
            "skipped": self.skipped,
            "best": self.best.noted(),
            "rectifier": self.revised.notes(),
        }
        self.checkpoints.save(self.done, self.state, notes)

    def _take_less(self, error: RuntimeError) -> None:
        """Goes on with a step that takes less memory, from before the one that had too little: that
        may have taken the state.
        """
        newest = self.checkpoints.newest()
        if newest is None:
            raise error
        self.step = self.revised.less(self.done, error)
        self._back(newest)

    def _leave_out(self, found: NotFinite, not_finite: int) -> None:
        """Goes back to before a step whose metrics are not finite, and leaves it out from then on,
        or what seems to be the cause. Raises NotFiniteError where nothing is left to try.
        """
        tried = attempt(found.number, self.skipped, self._causes, not_finite)
        to = self.checkpoints.before(tried.cause or tried.first)
        if tried.cause is None or to is None:
            whole = f"that of step {to.step} is whole" if to else "none from before is whole"
            raise NotFiniteError(
                f"train: step {found.number}: {found.said}, for the {tried.count}. step in a row;"
                f" of the checkpoints {whole}"
            ) from None
        self._causes |= {tried.cause} - {tried.first}
        self._back(to)
        self.skipped = sorted(tried.skipped)
