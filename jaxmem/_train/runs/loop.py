"""A training loop that loses nothing: it saves checkpoints during training, resumes where it
stopped, ends after a signal, and goes back if a loss is not finite.
"""

import collections
import contextlib
import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxmem._target.compile.running import ran_out_of_memory
from jaxmem._target.processes.pace import Pace
from jaxmem._train.checkpoints.checkpoints import Checkpoint, Checkpoints
from jaxmem._train.checkpoints.stored import changed, shape
from jaxmem._train.runs.positions import Data, check_settings
from jaxmem._train.runs.record import Record
from jaxmem._train.runs.revised import Revised
from jaxmem._train.runs.rows import Best, StepMeter, numbers
from jaxmem.errors import NotFiniteError, RunError

WATCHED = ("loss", "grad_norm")  # the metrics that must be finite


class NotFinite(Exception):
    """The metrics of step `number` are not finite."""

    def __init__(self, number: int, row: Mapping[str, float]):
        super().__init__()
        self.number = number
        self.said = " and ".join(f"the {name} is {row[name]}" for name in WATCHED if name in row)


class Loop:
    """The state of a running training: `state` is the state after step `done`, and `skipped` are
    the steps that were left out.
    """

    def __init__(
        self,
        step,
        data: Data,
        run: Record,
        checkpoints: Checkpoints,
        settings,
        measured: StepMeter,
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
        self._compared = False  # whether a step's result was compared with the first state
        self._causes: set[int] = set()  # steps skipped as the cause of later steps

    def start(self, state, steps: int, owned: bool) -> None:
        """Starts from a state, or resumes from the newest checkpoint.

        owned: whether nobody else uses the state's arrays.
        """
        leaves, self._structure = jax.tree.flatten_with_path(state)
        if not any(getattr(leaf, "size", 1) for _, leaf in leaves):
            raise RunError("train: `state` holds no array with a value; expected what is trained")
        self._like, self.state = [(path, shape(leaf)) for path, leaf in leaves], state
        found = self.checkpoints.newest()
        if found is None or not found.step:  # no step was done, so the settings may differ
            self.run.rows_until(0)
            self.revised.back(0, begins=True)
            self._checkpoint()  # for a loss that is not finite before the first save
            return
        check_settings(found.notes["settings"], self.settings, self.run.folder)
        if found.step > steps:
            raise RunError(
                f"train: the checkpoint is of step {found.step}, and `steps` is {steps}; expected"
                " as many at least, or another folder"
            )
        # The first state is freed before the other is read, so that only one is in memory.
        for _, leaf in leaves if owned else ():
            if isinstance(leaf, jax.Array):
                leaf.delete()
        del state, leaves
        self.run.kept = self._back(found)
        self.revised.back(found.step, begins=True)
        self.step = self.revised.restore(found.step, found.notes.get("rectifier")) or self.step

    def _back(self, to: Checkpoint) -> list[dict[str, float | None]]:
        """Returns to a checkpoint, and returns the rows of the steps up to it."""
        self.state = None
        self.state = self._structure.unflatten(to.leaves(self._like))
        self.done, self.skipped = to.step, list(to.notes["skipped"])
        self.data.go(to.notes["position"])
        self._waiting.clear()
        self.measured.begin()
        self.best.begin(self.checkpoints.least(to.step))
        self.revised.back(to.step, begins=False)
        return self.run.rows_until(to.step)

    def go_on(self, steps: int, not_finite: int) -> None:
        self.pace.saved()
        self.pace.agree(self.done)
        while True:
            try:
                while self.done < steps and self.pace.ended is None:
                    self._run_or_skip()
                    if self.best.rare:
                        self._read(0)
                    due = self.pace.due(self.done) or self.best.is_least
                    due = due and self.done < steps
                    # Not after a skipped step: the cause of its fault may be in the state.
                    if due and self.done not in self.skipped:
                        self._save()
                        self.pace.saved()
                self._save()
                if self.done == steps:
                    self.checkpoints.sound(steps)  # no later step will call it
                self.checkpoints.wait()
                self.pace.agree(self.done)
            except NotFinite as found:
                self._leave_out(found, not_finite)
            except jax.errors.JaxRuntimeError as error:
                if not (ran_out_of_memory(error) and self.run.processes.alone):
                    raise
                self._take_less(error)
            except KeyboardInterrupt:
                with contextlib.suppress(NotFinite):
                    self._read(0)  # the rows of the finished steps
                raise
            else:
                break

    def _run_or_skip(self) -> None:
        """Runs the next step, or skips it."""
        number = self.done + 1
        batch = self.data(number)
        if number in self.skipped:
            self._read(0)
            self._write(number, {"skipped": 1.0})
        else:
            self.revised.look(number, self.state, batch)
            self.state, metrics = self._result(self.step(self.state, batch))
            self.best.done(metrics)
            self._waiting.append((number, metrics))
            self._read(1)
            self.step = self.revised.step(number) or self.step
        self.done = number

    def _result(self, result) -> tuple[Any, Mapping[str, Any]]:
        """The step's result. Raises RunError unless it is a state like the first state, and a dict.
        Only the first result is compared with the first state.
        """
        pair = result if isinstance(result, tuple | list) else ()
        if len(pair) != 2 or not isinstance(pair[1], Mapping):
            parts = [type(one).__name__ for one in pair] or ""
            raise RunError(
                f"train: `step` returned {type(result).__name__} {parts}; expected a pair (state,"
                " metrics), with metrics in a dict such as {'loss': loss}"
            )
        if not self._compared and (differs := changed(pair[0], self._like)):
            raise RunError(
                f"train: `step` returned another state than it received: {differs}; expected a"
                " state of the same tree, shapes and dtypes"
            )
        self._compared = True
        return pair[0], pair[1]

    def _read(self, behind: int) -> None:
        """Reads the metrics of all steps but the last `behind`, which waits for them."""
        while len(self._waiting) > behind:
            number, metrics = self._waiting[0]
            row = numbers(metrics)
            for name in WATCHED:
                if metrics.get(name) is not None and name not in row:
                    raise RunError(
                        f"train: step {number} returned {reprlib.repr(metrics[name])} as {name!r};"
                        " expected a real scalar, such as the mean over the batch"
                    )
            if not all(math.isfinite(row.get(name, 0.0)) for name in WATCHED):
                raise NotFinite(number, row)
            self._waiting.popleft()
            self.checkpoints.sound(number - 1)
            row |= self.measured(number)
            self._write(number, row | self.revised.row(number, row.get("step_seconds")))

    def _write(self, number: int, row: Mapping[str, float]) -> None:
        """Writes the row of a step."""
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
        """Saves the state, and the facts that the run needs to resume."""
        notes = {
            "settings": self.settings,
            "position": self.data.position,
            "skipped": self.skipped,
            "best": self.best.noted(),
            "rectifier": self.revised.notes(),
        }
        self.checkpoints.save(self.done, self.state, notes)

    def _take_less(self, error: RuntimeError) -> None:
        """Continues with a step that needs less memory, from the checkpoint before the step that
        ran out of memory: that step may have consumed the state.
        """
        newest = self.checkpoints.newest()
        if newest is None:
            raise error
        number = self._waiting[0][0] if self._waiting else self.done + 1
        self.step = self.revised.less(number, error)
        self._back(newest)

    def _leave_out(self, found: NotFinite, not_finite: int) -> None:
        """Returns to a checkpoint before a step whose metrics are not finite, and skips the step,
        or the step that seems to be its cause. Raises NotFiniteError if nothing is left to try.
        """
        skipped = {*self.skipped, found.number}
        first = next(n for n in range(found.number, 0, -1) if n - 1 not in skipped)
        count = found.number - first + 1
        cause = cause_of(first, count, self._causes, not_finite)
        to = self.checkpoints.before(cause or first)
        if cause is None or to is None:
            whole = f"that of step {to.step} is whole" if to else "none from before is whole"
            raise NotFiniteError(
                f"train: step {found.number}: {found.said}, for the {count}. step in a row;"
                f" of the checkpoints {whole}"
            ) from None
        if cause != first:
            self._causes.add(cause)
            skipped = {*skipped.difference(range(first, found.number + 1)), cause}
        self._back(to)
        self.skipped = sorted(skipped)


def cause_of(first: int, count: int, causes: Collection[int], not_finite: int) -> int | None:
    """The step before which the run resumes, if `count` steps in a row, from step `first` on, are
    not finite. The step is skipped. None if nothing is left to try.

    causes: the steps that were skipped before as the cause of later steps.

    At first, the steps themselves are skipped. If `not_finite` steps in a row were skipped in vain,
    the update of the step before them has damaged the state, and the saved states too: the metrics
    of that step describe the state before its update. That step is then skipped in their place.
    """
    if count < not_finite:
        return first
    tried = first in causes or len(causes) >= not_finite - 1
    return None if tried or first == 1 else first - 1
