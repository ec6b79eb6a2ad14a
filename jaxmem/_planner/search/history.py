"""The compiles of a step by earlier searches, from the database. The next search for the step
starts with them.

Earlier compiles decide which plans a search compiles. A search never returns an earlier compile: it
compiles the plan that it returns itself.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import TypeVar

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
# Two steps that ran in alternation, given by their actions or by their costs; the measured seconds
# by which the first step took longer; and the error bound of these seconds.
Comparison = tuple[T, T, float, float]


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
        """Earlier compiles, the latest last. Entries that cannot be read are left out."""
        steps = []
        for actions, result in self._database.read_tried(self._device, self._step, RECALLED):
            try:
                steps.append(CompiledStep(_parse(actions), Compiled(**json.loads(result))))
            except (ValueError, TypeError, AttributeError):
                continue  # for example, an entry of another version of jaxmem
        return steps

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
        """Pairs of steps that earlier searches ran in alternation. Entries that cannot be read are
        left out.
        """
        runs = []
        for actions, result in self._database.read_tried(
            f"{self._device} runs", self._step, RECALLED
        ):
            try:
                other, seconds, noise = json.loads(result)
                runs.append((_parse(actions), _parse(other), float(seconds), float(noise)))
            except (ValueError, TypeError, AttributeError):
                continue
        return runs

    def remember_run(self, run: Comparison[Actions]) -> None:
        """Stores the measured difference of two steps."""
        first, other, *measured = run
        result = json.dumps([_text(other), *measured])
        self._database.write_tried(f"{self._device} runs", self._step, _text(first), result)

    def recall_least(self, key: str) -> Actions | None:
        """The assignment of least bytes that an earlier search found; None if no search did.

        key: a text of the open choices and the limits of that search.
        """
        for actions, _ in self._database.read_tried(f"{self._device} least", self._under(key), 1):
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                return _parse(actions)
        return None

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
