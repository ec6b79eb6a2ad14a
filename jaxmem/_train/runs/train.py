"""train(): reads its arguments, and runs the loop."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmem._core.reader import is_whole
from jaxmem._core.warn import warn
from jaxmem._target.processes.pace import Pace
from jaxmem._target.processes.signals import Interrupted, held
from jaxmem._train.checkpoints.checkpoints import CHECKPOINTS, Checkpoints
from jaxmem._train.rectifier.rectify import Rectifier
from jaxmem._train.runs.loop import Loop
from jaxmem._train.runs.positions import Data, as_json
from jaxmem._train.runs.record import Record
from jaxmem._train.runs.revised import Revised
from jaxmem._train.runs.rows import StepMeter
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
    """Trains for `steps` steps, with checkpoints, and returns the state after the last step.

        with jaxmem.runs.record("runs/mine", resume=True) as run:
            state = jaxmem.runs.train(plan.step, init, batch_of, steps=1000, run=run)

    Each step writes a row to the run's folder: the step's metrics, its `step_seconds`, and
    `peak_bytes` if the devices report this number.

    If the process ends by a signal, an error or a failure of the machine, the same lines resume
    from the newest checkpoint. Losses and state then equal an uninterrupted run's, bit for bit.
    After SIGTERM or SIGINT, the run finishes its step, saves a checkpoint, and raises
    `Interrupted`.

    A checkpoint is complete once its manifest, with the SHA-256 sums of its files, is on the disk.
    If a file of a checkpoint was changed, a warning says so, and the run uses the checkpoint
    before.

    Arguments:
      step: `step(state, batch) -> (state, metrics)`. The new state has the tree, the shapes and the
        dtypes of the old state. The step may donate the state. `metrics` is a dict. The scalars of
        `metrics` are the numbers of the step's row. Other values are not written, but `loss` and
        `grad_norm` must be real scalars. `train` reads the scalars one step later, so that the
        device does not wait.
      state: the first state, or a function that makes it. A resumed run restores a state with the
        tree and the placement of the first state. If `state` is a function, a resumed run calls it
        to learn the tree and the placement, and then frees the arrays.
      data: the batches: a function from the number of a step, which starts at 1, to the batch of
        the step; or an iterator whose get_state() and set_state() return and set its position, such
        as grain's.
      steps: number of steps in total.
      run: the record, from `record` with `resume=True`.
      save_every: seconds between two checkpoints. A checkpoint is also saved at the beginning and
        at the end. Checkpoints are written while training continues.
      keep: number of checkpoints that are kept, at least 1. With 1, the checkpoint before is
        deleted only after a later step has finite metrics.
      best: the name of a metric. The checkpoint with the least value of the metric is kept in
        addition. The value of a checkpoint is the value in the row of its step. A checkpoint
        without a value is never the best. If a step has the metric, the step before has none, and
        the value is the least so far, the run saves a checkpoint at once. None follows no metric.
      not_finite: number of steps in a row, at least 1. If `loss` or `grad_norm` of a step is not
        finite, the run returns to the newest checkpoint, and skips the batch of the step from then
        on; its row says `skipped`. If `not_finite` steps in a row are not finite, the run returns
        to an earlier checkpoint, and skips the step before these steps in their place. After
        `not_finite` − 1 such attempts, the run ends.
      settings: values that must be equal when the run resumes, as JSON.
      units: the number of units in a step by name, such as `{"tokens": 4096}`. Each row then has
        `tokens_per_second`.
      each: `each(step, row)` is called with each row when it is written, and again for a step that
        runs again. `run.kept` has the rows of the steps before a resumed run.
      rectifier: a `Rectifier`, which revises the plan of `step` during training, and replans for
        less memory if a step runs out of memory. The clock decides when a new plan is ready. With
        lossy codecs, two such runs are therefore not equal bit for bit.

    Raises RunError for invalid arguments, for a wrong result of `step`, for checkpoints with other
    settings or another state, if no checkpoint is complete, and if a checkpoint cannot be written.
    Raises NotFiniteError if losses are not finite, and Interrupted if a signal ended the run.
    """
    is_seconds = isinstance(save_every, numbers.Real) and save_every >= 0
    _check(
        steps=(steps, is_whole(steps), "a whole number of at least 0"),
        keep=(keep, is_whole(keep, 1), "a whole number of at least 1"),
        not_finite=(not_finite, is_whole(not_finite, 1), "a whole number of at least 1"),
        save_every=(save_every, is_seconds, "a number of seconds, at least 0"),
        settings=(settings, isinstance(settings, Mapping | None), "a dict or None"),
        units=(units, isinstance(units, Mapping | None), "a dict or None"),
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
            measured, revised = StepMeter(units or {}), Revised(rectifier, run, steps)
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


def _check(**arguments: tuple[Any, bool, str]) -> None:
    """Raises RunError for the first argument that is wrong. Each argument is given as its value,
    whether the value is right, and the expected value in words.
    """
    for name, (value, is_right, expected) in arguments.items():
        if not is_right:
            raise RunError(f"train: `{name}` is {value!r}; expected {expected}")
