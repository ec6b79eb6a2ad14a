"""train(): reads its arguments, and runs the loop."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmem._core.warn import warn
from jaxmem._target.processes.pace import Pace
from jaxmem._target.processes.signals import Interrupted, held
from jaxmem._train.checkpoints.checkpoints import CHECKPOINTS, Checkpoints
from jaxmem._train.rectifier.rectify import Rectifier
from jaxmem._train.runs.loop import Loop
from jaxmem._train.runs.positions import Data, as_json
from jaxmem._train.runs.record import Record
from jaxmem._train.runs.revised import Revised
from jaxmem._train.runs.rows import Measured
from jaxmem.errors import RunError


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
        a step runs out of memory. When a plan is ready is a matter of the clock: with codecs that
        lose something, such a run is not another one bit for bit.

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
            loop = Loop(step, batches, run, checkpoints, lasting, measured, revised, each, pace)
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
