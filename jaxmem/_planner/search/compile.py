"""Compiles a step under given actions for the target, and counts compiles and their seconds.

The compiled program is always `build(plan)` for a plan that a user can give. The alternative,
`build(None)` in place of such a plan, is never compiled, because a `build` may treat None in a way
of its own. So the program that was compiled is the program that runs.
"""

import dataclasses
import enum
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxmem._core.actions import AS_WRITTEN, Actions, keeps_everything
from jaxmem._core.assignment import Assignment, Decisions, leaves_as_written
from jaxmem._model.states.places import Places
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._trace.step import trace
from jaxmem.errors import StepError


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that was compiled.

    actions: what it was compiled under.
    compiled: what was read of it: bytes, FLOPs and how long compiling took.
    places: where its model states are stored; None where no plan places them.
    """

    actions: Actions
    compiled: Compiled
    places: Places | None = None

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.compiled.total_bytes

    @property
    def host_bytes(self) -> int:
        return self.compiled.host_bytes


class Written(enum.Enum):
    """What the step is as its author wrote it, before a plan.

    PLANNED: its blocks have policies of jaxmem, so that a plan decides it however it is written.
    KEPT: no block has a policy, and nothing is under a checkpoint: everything is kept.
    CHECKPOINTED: no block has a policy of jaxmem, and some are under checkpoints of the author's.
    """

    PLANNED = enum.auto()
    KEPT = enum.auto()
    CHECKPOINTED = enum.auto()


class StepCompiler:
    """Compiles steps of one `build`; counts compiles, and the seconds spent waiting for them.

    What is compiled is always `build(plan)` for what a user would give as `plan`, so that the
    program that was compiled is the program that runs.

    build: takes a plan and returns the step.
    args: the step's arguments, as arrays or shapes.
    backend: where it is compiled.
    written: what the step is as its author wrote it.
    idle_blocks: labels of blocks that no gradient runs through. Actions do not name them, and
      `build` asks what is decided for them too, so they are recomputed.
    """

    def __init__(self, build, args: tuple, backend: Backend, written: Written = Written.PLANNED):
        self.build, self.args, self.backend, self.written = build, args, backend, written
        self.idle_blocks: tuple[str, ...] = ()
        self.compiles = 0
        self.seconds = 0.0
        self._begun: list[tuple[Actions, Future[Compiled]]] = []
        # The step as written, and with everything kept: each is checked, and compiled later.
        self._traced: dict[bool, tuple[Any, jax.stages.Traced]] = {}

    def trace(self, plan: Decisions) -> jax.stages.Traced:
        """The step under a plan, traced and not compiled."""
        return self._stages(plan)[1]

    def compile(self, *many: Actions) -> list[CompiledStep]:
        """Compiles the step under each of `many` actions, side by side where the target allows."""
        return all_compiled(self.try_compile(*many))

    def try_compile(self, *many: Actions) -> list[CompiledStep | StepError]:
        """Compiles the step under each of `many` actions; an error stands for a step that XLA could
        not compile.
        """
        self.compiles += len(many)
        return self.compile_buffers(*many)

    def compile_buffers(self, *many: Actions) -> list[CompiledStep | StepError]:
        """Compiles the step under each of `many` actions as `try_compile` does, and does not count
        the compiles.
        """
        start = time.perf_counter()
        futures = [self._begin(actions) for actions in many]  # before the first is waited for
        found: list[CompiledStep | StepError] = []
        for actions, future in zip(many, futures):
            try:
                found.append(CompiledStep(actions, future.result()))
            except StepError as error:
                found.append(error)
        self.seconds += time.perf_counter() - start
        return found

    def begin(self, actions: Actions) -> None:
        """Begins a compile that `try_compile` will be asked for. It gains where the backend
        compiles beside what this process does: where its `width` is above 1.
        """
        self._begun.append((actions, self._begin(actions)))

    def _begin(self, actions: Actions) -> "Future[Compiled]":
        """The compile of the step under `actions`, begun now unless it was before."""
        for i, (other, _) in enumerate(self._begun):
            if other == actions:
                return self._begun.pop(i)[1]
        return self.backend.assign(*self._stages(self.plan_of(actions)))

    def compile_fully(self, step: CompiledStep) -> CompiledStep:
        """Compiles a step whole, whose buffers alone were assigned; another is returned as it is.

        Raises StepError where XLA does not compile it.
        """
        if not self.backend.assigns:
            return step
        start = time.perf_counter()
        compiled = self.backend.compile(*self._stages(self.plan_of(step.actions))).result()
        self.compiles += 1
        self.seconds += time.perf_counter() - start
        return CompiledStep(step.actions, compiled)

    def run(self, *many: CompiledStep, seconds: float) -> list[list[float]]:
        """Seconds of compiled steps in rounds that go on for `seconds`, as `Backend.run` gives
        them.
        """
        compiled = [step.compiled for step in many]
        return self.backend.run(compiled, self.trace(Assignment.unchanged()), self.args, seconds)

    def _stages(self, plan: Decisions) -> tuple[Any, jax.stages.Traced]:
        """The step's own traced stage under a plan, and JAX's."""
        if plan not in (Assignment.unchanged(), Assignment.everything()):
            return trace(self.build, plan, self.args)
        key = leaves_as_written(plan)
        if key not in self._traced:
            self._traced[key] = trace(self.build, plan, self.args)
        return self._traced[key]

    def plan_of(self, actions: Actions) -> Assignment:
        """What `build` is given for the step under `actions`."""
        kept = keeps_everything(actions)
        if actions == AS_WRITTEN or (kept and self.written is Written.KEPT):
            return Assignment.unchanged()
        if kept:
            return Assignment.everything()
        return Assignment({label: {} for label in self.idle_blocks} | actions)


def all_compiled(found: Sequence[CompiledStep | StepError]) -> list[CompiledStep]:
    """The steps, if all were compiled; else raises the first of their errors."""
    for step in found:
        if isinstance(step, StepError):
            raise step
    return [step for step in found if isinstance(step, CompiledStep)]
