"""The interface between a search and the target that it plans for.

A search is given a `Backend`, and never branches on the kind of target. The backend compiles,
explains and times steps, and states the margin of a budget and how many compiles run at the same
time. A profile needs less than a search, a `Pricing`, which compiles nothing.
"""

import abc
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Self

import jax

from jaxmem._core.database import Database, Timing
from jaxmem._target.buffers.held_buffers import Peak
from jaxmem._target.compile.running import CannotRun
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import shardings_of
from jaxmem._trace.jaxpr import ClosedJaxpr, Jaxpr
from jaxmem._trace.job import Job
from jaxmem._trace.liveness.walk import temporary_bytes
from jaxmem.errors import StepError


class Pricing:
    """What a profile asks of a target: where the times of pieces of work come from.

    This base class knows no times, so a profile computes them from the target's peak rates.

    source: "measured", "xla" (its estimates) or "roofline".
    """

    source = "roofline"

    def __init__(self, target: Target):
        self.target = target

    @property
    def device(self) -> str:
        """The name of the measured device. A stored time is valid for this device only."""
        return f"{self.target.name} {self.target.kind}"

    def times(self, jobs: Sequence[Job]) -> Sequence[Timing | None] | None:
        """Returns the time of each job, with None for a job that cannot be timed; or None in place
        of the times if the backend knows no times.
        """
        return None

    @property
    def link(self) -> tuple[float, float]:
        """Bytes a second from host memory to the device, and back: measured where they can be."""
        return self.target.link_ways or (self.target.link, self.target.link)


class Backend(Pricing, abc.ABC):
    """Compiles, times and runs steps for a target. Use it in a `with` statement: its end stops the
    processes of the backend.

    margin: the share of a budget that a plan leaves free, since the device may need it.
    parallel_compiles: the number of steps that the backend compiles at the same time.
    stops_at_buffers: whether the compiler can stop after it has assigned buffers. The bytes and the
      costs of a step are known then, so that `compile_buffers` takes a fraction of the time of
      `compile_fully`.
    compiles_references: whether the references of the codecs' kernels are compiled in place of the
      kernels if arrays are divided over devices.
    database: the stored times and compiles; the backend reads it, and adds to it.
    """

    margin = 0.0
    parallel_compiles = 1
    stops_at_buffers = False
    compiles_references = False

    def __init__(self, target: Target, database: Database | None = None):
        super().__init__(target)
        self.database = database or Database()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        return

    @abc.abstractmethod
    def compile_fully(self, stage, traced: jax.stages.Traced) -> Future[Compiled]:
        """Compiles the step as it will run, and returns a future of the result.

        stage: the step's own traced stage, whose executable is called as the step is.
        traced: JAX's, as `jaxmem._trace.step.trace` returns both.
        """

    def compile_buffers(self, stage, traced: jax.stages.Traced) -> Future[Compiled]:
        """Compiles the step for its bytes and costs only. If `stops_at_buffers`, the compiler stops
        after it has assigned buffers; else the step is compiled fully. The arguments and the result
        are as for `compile_fully`. A search compiles the plan that it returns fully, and other
        plans for buffers only.
        """
        return self.compile_fully(stage, traced)

    def temporary_bytes(
        self,
        traced: jax.stages.Traced,
        shards: int = 1,
        kernels: bool = False,
        args: tuple = (),
        program: ClosedJaxpr | Jaxpr | None = None,
    ) -> int:
        """Bytes that a step is expected to take in addition to its arguments: the bytes that the
        compiler assigns if `stops_at_buffers`, else a liveness estimate.

        shards: the number of devices over which a block's tensors are divided.
        kernels: whether codecs' kernels run on divided arrays even if `compiles_references`.
        args: the arguments that the step was traced for, whose shardings tell how a mesh divides
          each value.
        program: a program for the same arguments as `traced`, to estimate in its place.
        """
        if (compiled := self._assigned(traced)) is not None:
            return compiled.total_bytes - compiled.argument_bytes
        donated = [i for i, a in enumerate(jax.tree.leaves(traced.args_info)) if a.donated]
        return temporary_bytes(
            traced.jaxpr if program is None else program,
            donated,
            on_gpu=self.target.traits.as_gpu,
            shards=shards,
            divided=kernels or self.target.local,
            shardings=shardings_of(traced, args) if self.target.devices > 1 else (),
        )

    def step_bytes(
        self, traced: jax.stages.Traced, program: ClosedJaxpr | Jaxpr | None, arguments: int
    ) -> int:
        """Bytes that a step is expected to take. `traced` and `program` are as for
        `temporary_bytes`.

        arguments: bytes of the step's arguments. They are not used if the compiler assigns the
          buffers of the arguments.
        """
        if (compiled := self._assigned(traced)) is not None:
            return compiled.total_bytes
        return arguments + self.temporary_bytes(traced, program=program)

    def _assigned(self, traced: jax.stages.Traced) -> Compiled | None:
        """The step compiled for buffers; None if only a full compile assigns buffers, or if XLA
        does not compile the step.
        """
        if self.stops_at_buffers:
            with contextlib.suppress(StepError):
                return self.compile_buffers(None, traced).result()
        return None

    @abc.abstractmethod
    def explain(self, traced: jax.stages.Traced) -> tuple[Compiled, Peak]:
        """Compiles the step once more, and returns the facts read from the executable, and its
        buffers.
        """

    def run(
        self, steps: Sequence[Compiled], traced: jax.stages.Traced, args: tuple, seconds: float
    ) -> list[list[float]]:
        """Returns the seconds of each of several compiled steps in each of several rounds, none for
        a step that was not compiled to run, or for which there is no memory.

        traced: the trace of one step, which shows the operations besides its work.
        args: arrays or shapes that they were traced for.
        seconds: how long the rounds go on.

        Raises CannotRun if no such step is run here.
        """
        raise CannotRun(f"the target {str(self.target)!r} is not the device at hand")
