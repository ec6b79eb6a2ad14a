"""The interface between a search and the target that it plans for.

A search is given a `Backend`, and never branches on the kind of target. The backend compiles,
explains and times steps, and states the margin of a budget and how many compiles run at the same
time. A profile needs less than a search, a `Pricing`, which compiles nothing.
"""

import abc
import concurrent.futures
import contextlib
from collections.abc import Sequence
from typing import Self

import jax

from jaxmem._core.database import Database, Timing
from jaxmem._target.buffers.held import Peak
from jaxmem._target.compile.running import CannotRun
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
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
        """What a stored time was taken on, as a text; it holds for no other."""
        return f"{self.target.name} {self.target.kind}"

    def times(self, jobs: Sequence[Job]) -> list[Timing] | None:
        """Returns the time of each job, or None unless every one of them has a time."""
        return None

    @property
    def link(self) -> tuple[float, float]:
        """Bytes a second from host memory to the device, and back: measured where they can be."""
        return self.target.link_ways or (self.target.link, self.target.link)


class Backend(Pricing, abc.ABC):
    """What a search asks of a target. Use it in a `with` statement, which ends its processes.

    margin: the share of a budget that is left free, since the device may need it.
    width: how many compiles are worth asking for at once.
    assigns: whether bytes and costs are known before a compile is done, so that `assign` takes a
      part of the time that `compile` takes.
    compiles_references: whether the references of the codecs' kernels are compiled in place of the
      kernels where arrays are divided over devices.
    database: what was timed and compiled before, and where it is written down.
    """

    margin = 0.0
    width = 1
    assigns = False
    compiles_references = False

    def __init__(self, target: Target, database: Database | None = None):
        super().__init__(target)
        self.database = database or Database()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        return

    @abc.abstractmethod
    def compile(self, stage, traced: jax.stages.Traced) -> "concurrent.futures.Future[Compiled]":
        """Compiles the step as it will run, and returns a future of the result.

        stage: the step's own traced stage, whose executable is called as the step is.
        traced: JAX's, as `jaxmem._trace.step.trace` returns both.
        """

    def assign(self, stage, traced: jax.stages.Traced) -> "concurrent.futures.Future[Compiled]":
        """The same, ended where buffers are assigned, if the target's compiler can. What a search
        returns is compiled whole; what it only weighs need not be.
        """
        return self.compile(stage, traced)

    def temporary_bytes(
        self, traced: jax.stages.Traced, shards: int = 1, kernels: bool = False
    ) -> int:
        """Bytes that a step is expected to take in addition to its arguments: those that the
        compiler assigns where `assigns`, else a liveness estimate.

        shards: over how many devices a block's tensors are divided.
        kernels: whether codecs' kernels run on divided arrays, also where references are compiled.
        """
        if (compiled := self._assigned(traced)) is not None:
            return compiled.total_bytes - compiled.argument_bytes
        donated = [i for i, a in enumerate(jax.tree.leaves(traced.args_info)) if a.donated]
        return temporary_bytes(
            traced.jaxpr,
            donated,
            on_gpu=self.target.traits.as_gpu,
            shards=shards,
            divided=kernels or self.target.local,
        )

    def step_bytes(self, traced: jax.stages.Traced, arguments: int) -> int:
        """Bytes that a step is expected to take. `arguments` are those of its arguments, unless the
        compiler assigns their buffers.
        """
        if (compiled := self._assigned(traced)) is not None:
            return compiled.total_bytes
        return arguments + self.temporary_bytes(traced)

    def _assigned(self, traced: jax.stages.Traced) -> Compiled | None:
        """The step with its buffers assigned; None where only a whole compile assigns them, or XLA
        refuses the step.
        """
        if self.assigns:
            with contextlib.suppress(StepError):
                return self.assign(None, traced).result()
        return None

    @abc.abstractmethod
    def explain(self, traced: jax.stages.Traced) -> tuple[Compiled, Peak]:
        """Compiles the step once more, and returns what was read from it and what its buffers
        hold.
        """

    def run(
        self, steps: Sequence[Compiled], traced: jax.stages.Traced, args: tuple, seconds: float
    ) -> list[list[float]]:
        """Returns the seconds of each of several compiled steps in each of several rounds, none for
        a step that was not compiled to run, or for which there is no memory.

        traced: one of them, which tells what it does besides its work.
        args: arrays or shapes that they were traced for.
        seconds: how long the rounds go on.

        Raises CannotRun if no such step is run here.
        """
        raise CannotRun(f"the target {str(self.target)!r} is not the device at hand")
