"""Compiles a step under given actions for the target, and counts what that takes."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxmem._compiled.compiled import Compiled
from jaxmem._core.actions import Actions, keeps_everything
from jaxmem._core.assignment import Assignment, Decisions
from jaxmem._jax.step import trace
from jaxmem._xla.protocol import Backend, Built
from jaxmem.errors import StepError


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that was compiled.

    actions: what it was compiled under.
    compiled: what was read of it: bytes, FLOPs and how long compiling took.
    executable: what runs it; None where it cannot run here, or is only remembered.
    """

    actions: Actions
    compiled: Compiled
    executable: Any = None


class StepCompiler:
    """Compiles steps of one `build`; counts compiles, and the seconds spent waiting for them.

    build: takes a plan, or None for everything kept, and returns the step.
    args: the step's arguments, as arrays or shapes.
    backend: where it is compiled.
    idle_blocks: labels of blocks that no gradient runs through. Actions do not name them, and
      `build` asks what is decided for them too, so they are recomputed.
    """

    def __init__(self, build, args: tuple, backend: Backend, idle_blocks: tuple[str, ...] = ()):
        self.build, self.args, self.backend = build, args, backend
        self.idle_blocks = idle_blocks
        self.compiles = 0
        self.seconds = 0.0
        self._begun: list[tuple[Actions, Future[Built]]] = []

    def trace(self, plan: Decisions | None) -> jax.stages.Traced:
        """The step under a plan, traced and not compiled."""
        return self._stages(plan)[1]

    def compile(self, *many: Actions) -> list[CompiledStep]:
        """Compiles the step under each of `many` actions, side by side where the target allows."""
        return all_compiled(self.attempt(*many))

    def attempt(self, *many: Actions) -> list[CompiledStep | StepError]:
        """The same, with the error of each that XLA could not compile in its place."""
        self.compiles += len(many)
        return self.weigh(*many)

    def weigh(self, *many: Actions) -> list[CompiledStep | StepError]:
        """The same, not counted among the compiles."""
        start = time.perf_counter()
        futures = [self._begin(actions) for actions in many]  # before the first is waited for
        found: list[CompiledStep | StepError] = []
        for actions, future in zip(many, futures):
            try:
                built = future.result()
            except StepError as error:
                found.append(error)
            else:
                found.append(CompiledStep(actions, built.compiled, built.executable))
        self.seconds += time.perf_counter() - start
        return found

    def begin(self, actions: Actions) -> None:
        """Begins a compile that `attempt` will be asked for. It gains where the backend compiles
        beside what this process does: where its `width` is above 1.
        """
        self._begun.append((actions, self._begin(actions)))

    def _begin(self, actions: Actions) -> "Future[Built]":
        """The compile of the step under `actions`, begun now unless it was before."""
        for i, (other, _) in enumerate(self._begun):
            if other == actions:
                return self._begun.pop(i)[1]
        return self.backend.assign(*self._stages(self.plan_of(actions)))

    def prove(self, step: CompiledStep) -> CompiledStep:
        """Compiles a step whole, whose buffers alone were assigned; another is returned as it is.

        Raises StepError where XLA does not compile it.
        """
        if not self.backend.assigns:
            return step
        start = time.perf_counter()
        built = self.backend.compile(*self._stages(self.plan_of(step.actions))).result()
        self.compiles += 1
        self.seconds += time.perf_counter() - start
        return CompiledStep(step.actions, built.compiled, built.executable)

    def run(self, *many: CompiledStep, seconds: float) -> list[list[float]]:
        """Seconds of compiled steps in rounds that go on for `seconds`, as `Backend.run` gives
        them.
        """
        built = [Built(step.compiled, step.executable) for step in many]
        return self.backend.run(built, self.trace(None), self.args, seconds)

    def _stages(self, plan: Decisions | None) -> tuple[Any, jax.stages.Traced]:
        """The step's own traced stage under a plan, and JAX's."""
        return self._kept if plan is None else trace(self.build, plan, self.args)

    @functools.cached_property
    def _kept(self) -> tuple[Any, jax.stages.Traced]:
        """The step with everything kept, traced once: it is checked, and compiled later."""
        return trace(self.build, None, self.args)

    def plan_of(self, actions: Actions) -> Assignment | None:
        """What `build` is given; None is how a user says that everything is kept."""
        if keeps_everything(actions):
            return None
        return Assignment({label: {} for label in self.idle_blocks} | actions)


def all_compiled(found: Sequence[CompiledStep | StepError]) -> list[CompiledStep]:
    """The steps, if all were compiled; else raises the first of their errors."""
    for step in found:
        if isinstance(step, StepError):
            raise step
    return [step for step in found if isinstance(step, CompiledStep)]
