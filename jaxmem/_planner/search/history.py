"""The compiles of a step by earlier searches, from the database. The next search for the step
starts with them.

Earlier compiles decide which plans a search compiles. A search never returns an earlier compile: it
compiles the plan that it returns itself.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jaxmem._core.actions import Action, Actions, Choice
from jaxmem._core.database import Timing
from jaxmem._cost.profile.times import due
from jaxmem._model.tags.implementation import next_options
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._trace.jaxpr import text_of

RECALLED = 48  # the most compiles that are recalled, the latest ones
# The version of the meaning of "everything kept". In version 1 it meant the step as written, with
# the author's checkpoints.
FORM = 2


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Comparison(Generic[T]):
    """The measured difference of two steps. A step is given by its actions, or by their cost.

    first, other: the two steps.
    seconds: the measured seconds by which the first step took longer.
    noise: the error bound of the difference, in seconds.
    """

    first: T
    other: T
    seconds: float
    noise: float


class History:
    """The earlier compiles of one step on one target."""

    def __init__(self, backend: Backend, jaxpr):
        """The key of the step is its jaxpr, traced with every tag recomputed.

        backend: the compiler of the steps; its database is read and written. The stored compiles
          contain estimates of time, so that they are valid for this backend's rates only.
        jaxpr: the traced step.
        """
        # The user's XLA flags change the result of a local compile. Deviceless compiles run in
        # child processes with flags of their own.
        flags = os.environ.get("XLA_FLAGS", "") if backend.target.local else ""
        self._database, self._device = backend.database, f"{backend.target} {backend.device}"
        flags = " ".join([flags, *next_options()])  # the trace is the same under these options
        self._step = f"{FORM} {flags}\n{text_of(jaxpr)}"

    def recall(self) -> list[CompiledStep]:
        """Earlier compiles, the latest last."""
        compiled = lambda actions, result: CompiledStep(actions, Compiled(**json.loads(result)))
        return self._stored(self._device, self._step, compiled)

    def recall_seconds(self) -> float | None:
        """Measured seconds of an earlier search; None if no search measured them, or if a new
        measurement is due. The seconds are of the step with everything kept, or, in the history of
        the step as written, of the step as written.
        """
        timing = self._database.read_times(self._device, "step", [self._step]).get(self._step)
        return None if timing is None or due(timing, time.time()) else timing.seconds

    def remember_seconds(self, rounds: Sequence[float]) -> float:
        """Stores the seconds that `recall_seconds` returns, and returns them. They are the least
        seconds of several rounds, since other work of the machine only adds time.
        """
        least = min(rounds)
        timing = Timing(least, statistics.median(rounds) / least - 1)
        self._database.write_times(self._device, "step", {self._step: timing})
        return least

    def recall_runs(self) -> list[Comparison[Actions]]:
        """Pairs of steps that earlier searches ran in alternation."""

        def comparison(first: Actions, result: str) -> Comparison[Actions]:
            other, seconds, noise = json.loads(result)
            return Comparison(first, _parse(other), float(seconds), float(noise))

        return self._stored(f"{self._device} runs", self._step, comparison)

    def remember_run(self, run: Comparison[Actions]) -> None:
        """Stores the measured difference of two steps."""
        result = json.dumps([_text(run.other), run.seconds, run.noise])
        self._database.write_tried(f"{self._device} runs", self._step, _text(run.first), result)

    def recall_least(self, key: str) -> Actions | None:
        """The assignment of least bytes that an earlier search found; None if no search did.

        key: a text of the open choices and the limits of that search.
        """
        device, smallest = f"{self._device} least", lambda actions, _: actions
        return next(iter(self._stored(device, self._under(key), smallest, 1)), None)

    def remember_least(self, key: str, actions: Actions) -> None:
        """Stores the assignment of least bytes. `key` is as in `recall_least`."""
        device = f"{self._device} least"
        self._database.write_tried(device, self._under(key), _text(actions), "")

    def recall_plan(self, key: str) -> str | None:
        """The latest plan for the options that `key` describes, as the text that was stored."""
        found = self._database.read_tried(f"{self._device} plan", self._under(key), 1)
        return found[0][1] if found else None

    def remember_plan(self, key: str, plan: str) -> None:
        """Stores a plan as text."""
        self._database.write_tried(f"{self._device} plan", self._under(key), "", plan)

    def _stored(
        self, device: str, step: str, read: Callable[[Actions, str], T], most: int = RECALLED
    ) -> list[T]:
        """The latest `most` entries, the latest last. Entries that cannot be read, such as entries
        of another version of jaxmem, are left out.
        """
        found: list[T] = []
        for actions, result in self._database.read_tried(device, step, most):
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                found.append(read(_parse(actions), result))
        return found

    def _under(self, key: str) -> str:
        return f"{self._step}\n{key}"

    def remember(self, step: CompiledStep) -> None:
        """Stores a compile for later searches."""
        result = json.dumps(step.compiled.stored())
        self._database.write_tried(self._device, self._step, _text(step.actions), result)


def _text(actions: Actions) -> str:
    plain = {
        block: {tag: [c.action.value, c.codec] for tag, c in sorted(choices.items())}
        for block, choices in actions.items()
    }
    return json.dumps(plain, sort_keys=True)


def _parse(text: str) -> Actions:
    return {
        block: {tag: Choice(Action(action), codec) for tag, (action, codec) in choices.items()}
        for block, choices in json.loads(text).items()
    }
