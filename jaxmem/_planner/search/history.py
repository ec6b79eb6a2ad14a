"""The compiles of a step by earlier searches, from the database, with which the next search for the
step starts.

They guide; they prove nothing. A plan that is returned was compiled by the search that returns it.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from jaxmem._core.actions import Action, Actions, Choice
from jaxmem._core.database import Timing
from jaxmem._cost.profile.times import due
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._trace.jaxpr import text_of

MOST = 48  # how many of the latest compiles are recalled
FORM = 2  # of what "everything kept" means: it was the step as written, checkpoints and all, in 1


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Comparison(Generic[T]):
    """The difference of two steps, each known by its actions, or by their price.

    first, other: the two steps.
    seconds: the measured seconds by which the first took longer.
    noise: the seconds by which the difference may be off.
    """

    first: T
    other: T
    seconds: float
    noise: float


class History:
    """The earlier compiles of one step on one target."""

    def __init__(self, backend: Backend, jaxpr):
        """Takes the step's jaxpr, traced with every tag recomputed, as what it is known by.

        backend: what they were compiled by; its database is read and written. Estimates of time
          stand in what is remembered, so that it holds for the backend's rates alone.
        jaxpr: the traced step.
        """
        # The user's flags change what a local compile gives. Deviceless compiles run in child
        # processes that have flags of their own.
        flags = os.environ.get("XLA_FLAGS", "") if backend.target.local else ""
        self._database, self._device = backend.database, f"{backend.target} {backend.device}"
        self._step = f"{FORM} {flags}\n{text_of(jaxpr)}"

    def recall(self) -> list[CompiledStep]:
        """Earlier compiles, the latest last; what cannot be read is left out."""
        found = []
        for actions, result in self._database.read_tried(self._device, self._step, MOST):
            try:
                found.append(CompiledStep(_parse(actions), Compiled(**json.loads(result))))
            except (ValueError, TypeError, AttributeError):
                continue  # for example, another version of jaxmem wrote it
        return found

    def recall_seconds(self) -> float | None:
        """Seconds of the step with everything kept, as an earlier search measured them, if that is
        not worth doing again.
        """
        found = self._database.read_times(self._device, "step", [self._step]).get(self._step)
        return None if found is None or due(found, time.time()) else found.seconds

    def remember_seconds(self, rounds: Sequence[float]) -> float:
        """Writes down the seconds of such a step in several rounds. Returns the least of them: what
        else a machine does only adds time.
        """
        least = min(rounds)
        timing = Timing(least, statistics.median(rounds) / least - 1)
        self._database.write_times(self._device, "step", {self._step: timing})
        return least

    def recall_runs(self) -> list[Comparison[Actions]]:
        """Pairs of steps that earlier searches ran in turns; what cannot be read is left out."""
        found = []
        for actions, told in self._database.read_tried(f"{self._device} runs", self._step, MOST):
            try:
                other, seconds, noise = json.loads(told)
                found.append(
                    Comparison(_parse(actions), _parse(other), float(seconds), float(noise))
                )
            except (ValueError, TypeError, AttributeError):
                continue
        return found

    def remember_run(self, run: Comparison[Actions]) -> None:
        """Writes down by how much one step took longer than another."""
        told = json.dumps([_text(run.other), run.seconds, run.noise])
        self._database.write_tried(f"{self._device} runs", self._step, _text(run.first), told)

    def recall_least(self, key: str) -> Actions | None:
        """The assignment of least bytes among choices that `key` tells, as an earlier search found
        it; None where none did.
        """
        for actions, _ in self._database.read_tried(f"{self._device} least", self._under(key), 1):
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                return _parse(actions)
        return None

    def remember_least(self, key: str, actions: Actions) -> None:
        """Writes down the assignment of least bytes."""
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
        """Writes a compile down for later searches."""
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
