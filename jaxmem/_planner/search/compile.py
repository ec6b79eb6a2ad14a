"""Traces and compiles a step under given actions for the target, and counts compiles and their
seconds.

The compiled program is always `build(plan)` for a plan that a user can pass. The alternative,
`build(None)` in place of such a plan, is never compiled, because a `build` may treat None
differently. So the compiled program is the program that runs.

Under JAX's option `jax_remat3` a plan is traced twice: with today's checkpoint, to be read, and
under the user's options, to be compiled (`_model/tags/implementation.py`).

Most programs of a search are derived from one trace. The others are traced once, estimated, and
compiled later: the latest traces are kept. The alternative, to keep every trace of a search, takes
about 750 bytes for each equation, and a search traces up to 800,000 equations (`MOST_EQUATIONS` in
`estimates.py`).
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxmem._core.actions import AS_WRITTEN, Actions, stored
from jaxmem._core.assignment import Assignment, Decisions
from jaxmem._core.groups import keeps_everything, ungrouped
from jaxmem._model.tags.derive import RecomputedStep
from jaxmem._model.tags.implementation import next_options, todays_checkpoint
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
from jaxmem._trace.jaxpr import ClosedJaxpr, Jaxpr
from jaxmem._trace.step import trace
from jaxmem.errors import StepError

LATEST = 8  # the number of traces that are kept


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that was compiled.

    actions: the actions under which the step was compiled.
    compiled: the numbers of the compiled program: bytes, FLOPs, and the seconds of the compile.
    """

    actions: Actions
    compiled: Compiled

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.compiled.total_bytes

    @property
    def host_bytes(self) -> int:
        return self.compiled.host_bytes


def check_mesh(args: tuple, target: Target) -> None:
    """Raises StepError if arguments are sharded over a mesh that the target does not have: a mesh
    without devices if the target is the devices at hand, or a mesh of another size.
    """
    meshes = (getattr(getattr(a, "sharding", None), "mesh", None) for a in jax.tree.leaves(args))
    for mesh in meshes:
        if mesh is None or mesh.size == 1:
            continue
        if target.local and isinstance(mesh, jax.sharding.AbstractMesh):
            raise StepError(
                f"the step is sharded over an AbstractMesh of {mesh.size} devices, and the target"
                " is 'local'; expected a mesh of the devices at hand, or a target that the machine"
                f" need not have, such as target='h200:{mesh.size}'"
            )
        if not target.local and mesh.size != target.devices:
            raise StepError(
                f"the step is sharded over {mesh.size} devices, but the target has"
                f" {target.devices}; expected a mesh of as many devices as the target, or a target"
                f" of {mesh.size}, such as '{target.name}:{mesh.size}'"
            )


class StepCompiler:
    """Traces and compiles steps of one `build`; counts compiles, and the seconds spent waiting for
    them. `compile_buffers` compiles as far as bytes and costs need (`Backend.compile_buffers`);
    `compile_fully` compiles the step that will run.

    build: takes a plan and returns the step.
    args: the step's arguments, as arrays or shapes.
    backend: compiles the step.
    has_checkpoints: whether the step as its author wrote it has checkpoints without a policy of
      jaxmem. A step without such checkpoints keeps everything as written.
    idle_blocks: labels of blocks through which no gradient runs. Actions do not name these blocks,
      but `build` reads their choices from the plan. So they are recomputed.
    traced: the latest traces of the step, the latest one last.

    Raises StepError for arguments on a mesh that the target does not have.
    """

    def __init__(
        self, build, args: tuple, backend: Backend, has_checkpoints=True, idle_blocks=(), traced=()
    ):
        check_mesh(args, backend.target)
        self.build, self.args, self.backend = build, args, backend
        self.has_checkpoints: bool = has_checkpoints
        self.idle_blocks: tuple[str, ...] = idle_blocks
        self.compiles, self.seconds = 0, 0.0
        self._begun: list[tuple[Actions, Future[Compiled]]] = []
        # Traces by plan and by the options that were turned off, the latest last.
        self._traced: list[tuple[tuple[Decisions, tuple], tuple[Any, jax.stages.Traced]]]
        self._traced = [*traced]

    def with_facts(self, has_checkpoints: bool, idle_blocks: tuple[str, ...]) -> "StepCompiler":
        """A compiler of the same step that knows these facts of it, has the traces of this one, and
        has compiled nothing.
        """
        known = has_checkpoints, idle_blocks, self._traced
        return StepCompiler(self.build, self.args, self.backend, *known)

    def trace(self, plan: Decisions) -> jax.stages.Traced:
        """Traces the step under a plan with today's checkpoint, to read its blocks."""
        return self.read(plan)[1]

    def read(self, plan: Decisions) -> tuple[Any, jax.stages.Traced]:
        """Traces the step as `stages` does, with today's checkpoint."""
        return self._stages(plan, next_options())

    def sized(self, plan: Decisions) -> jax.stages.Traced:
        """The trace from which the backend estimates bytes: of the program that runs if the backend
        compiles it for buffers, else of the program that is read.
        """
        return self.stages(plan)[1] if self.backend.stops_at_buffers else self.trace(plan)

    def derived(self, plan: Decisions) -> tuple[jax.stages.Traced, Jaxpr | ClosedJaxpr | None]:
        """As `sized`, for one of many plans: a trace, and the program that is estimated in place of
        the trace's own. The program is derived from the step with every tag recomputed. It is None
        if the program must be traced.
        """
        if not self.backend.stops_at_buffers:
            traced, recomputed = self._recomputed
            if (program := recomputed.under(plan)) is not None:
                return traced, program
        return self.sized(plan), None

    @functools.cached_property
    def _recomputed(self) -> tuple[jax.stages.Traced, RecomputedStep]:
        """The step with every tag recomputed, from which other programs are derived."""
        traced = self.trace(Assignment.nothing())
        return traced, RecomputedStep(traced.jaxpr)

    def compile_buffers(self, *many: Actions) -> list[CompiledStep]:
        """Compiles the step under each of `many` actions for buffers, at the same time if the
        backend can. Raises StepError if XLA does not compile one of the steps.
        """
        return all_compiled(self.try_compile_buffers(*many))

    def try_compile_buffers(
        self, *many: Actions, counted: bool = True
    ) -> list[CompiledStep | StepError]:
        """Compiles as `compile_buffers` does. For a step that XLA does not compile, the result is
        the error.

        counted: whether the compiles are added to `compiles`.
        """
        self.compiles += len(many) if counted else 0
        start = time.perf_counter()
        futures = [self._started(actions) for actions in many]  # begin all before waiting for one
        results: list[CompiledStep | StepError] = []
        for actions, future in zip(many, futures):
            try:
                results.append(CompiledStep(actions, future.result()))
            except StepError as error:
                results.append(error)
        self.seconds += time.perf_counter() - start
        return results

    def start(self, actions: Actions) -> None:
        """Begins a compile for buffers that a later call of `try_compile_buffers` waits for. This
        saves time if the backend compiles outside this process, that is, if its `parallel_compiles`
        is above 1.
        """
        self._begun.append((actions, self._started(actions)))

    def _started(self, actions: Actions) -> "Future[Compiled]":
        """The compile of the step under `actions`, which starts now unless it was started."""
        for i, (other, _) in enumerate(self._begun):
            if other == actions:
                return self._begun.pop(i)[1]
        return self.backend.compile_buffers(*self.stages(self.plan_of(actions)))

    def compile_fully(self, step: CompiledStep) -> CompiledStep:
        """Compiles a step fully that was compiled for buffers only. On a backend that always
        compiles fully, the step is returned unchanged.

        Raises StepError if XLA does not compile the step.
        """
        if not self.backend.stops_at_buffers:
            return step
        start = time.perf_counter()
        compiled = self.backend.compile_fully(*self.stages(self.plan_of(step.actions))).result()
        self.compiles += 1
        self.seconds += time.perf_counter() - start
        return CompiledStep(step.actions, compiled)

    def run(self, *many: CompiledStep, seconds: float) -> list[list[float]]:
        """Runs compiled steps in rounds for `seconds`, and returns the seconds of each round, as
        `Backend.run` does.
        """
        compiled = [step.compiled for step in many]
        return self.backend.run(compiled, self.trace(Assignment.unchanged()), self.args, seconds)

    def stages(self, plan: Decisions) -> tuple[Any, jax.stages.Traced]:
        """Traces the step under a plan as it runs, and returns the step's stage and JAX's traced
        stage.
        """
        return self._stages(plan, ())

    def _stages(self, plan: Decisions, off: tuple[str, ...]) -> tuple[Any, jax.stages.Traced]:
        """Traces the step as `stages` does, with JAX's options `off` turned off, or returns an
        earlier trace.
        """
        key = plan, off
        found = next((pair for pair in self._traced if pair[0] == key), None)
        with todays_checkpoint() if off else contextlib.nullcontext():
            pair = found or (key, trace(self.build, plan, self.args))
        self._traced = [*(other for other in self._traced if other is not found), pair][-LATEST:]
        return pair[1]

    def plan_of(self, actions: Actions) -> Assignment:
        """The argument of `build` for the step under `actions`."""
        kept = keeps_everything(actions)
        if actions == AS_WRITTEN or (kept and not self.has_checkpoints):
            return Assignment.unchanged()
        if kept:
            return Assignment.everything()
        if not any(ungrouped(label) != label or tags for label, tags in stored(actions).items()):
            return Assignment.nothing()
        return Assignment({label: {} for label in self.idle_blocks} | actions)


def all_compiled(results: Sequence[CompiledStep | StepError]) -> list[CompiledStep]:
    """The steps, if all were compiled; else raises the first of their errors."""
    for step in results:
        if isinstance(step, StepError):
            raise step
    return [step for step in results if isinstance(step, CompiledStep)]
