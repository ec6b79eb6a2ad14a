"""Where steps are compiled and pieces of them timed: on the device at hand, or without the device.

Everything that a search does differently for the two stands here; it is handed a `Backend`, and
asks nothing of the target's kind.
"""

import abc
import concurrent.futures
import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any, Self

import jax
from jax import export

from jaxmem._core.database import Database, Timing
from jaxmem._core.warn import warn
from jaxmem._device.target import Target
from jaxmem._jax.export import export_flat
from jaxmem._jax.job import Job
from jaxmem._xla.buffers import Peak, peak
from jaxmem._xla.compiled import Compiled, compile_dumped, read_compiled
from jaxmem._xla.deviceless import Compiler
from jaxmem._xla.timing import measure_all

DEVICELESS_MARGIN = 0.02  # autotuning picks other matrix kernels there: up to 1.3 % of bytes seen


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled step: what was read of it, and the executable where it can run here."""

    compiled: Compiled
    executable: Any = None


class Pricing:
    """What a profile asks of a target: where the times of pieces of work come from.

    As it is, it knows no times, so that the target's ceilings serve.

    source: "measured", "xla" (its estimates) or "roofline".
    """

    source = "roofline"

    def __init__(self, target: Target):
        self.target = target

    def times(self, jobs: Sequence[Job]) -> list[Timing] | None:
        """The time of each job, or None where they cannot be told for all."""
        return None


class Backend(Pricing, abc.ABC):
    """What a search asks of a target. Use it in a `with` statement, which ends its processes.

    margin: the share of a budget that is left free, since the device may need it.
    width: how many compiles are worth asking for at once.
    database: what was timed and compiled before, and where it is written down.
    """

    margin = 0.0
    width = 1

    def __init__(self, target: Target, database: Database | None = None):
        super().__init__(target)
        self.database = database or Database()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        return

    @abc.abstractmethod
    def compile(self, stage, traced: jax.stages.Traced) -> "concurrent.futures.Future[Built]":
        """The step, compiled as it will run.

        stage: the step's own traced stage, whose executable is called as the step is.
        traced: JAX's, as `jaxmem._jax.step.trace` returns both.
        """

    @abc.abstractmethod
    def explain(self, traced: jax.stages.Traced) -> tuple[Compiled, Peak]:
        """The step, compiled once more, and what its buffers hold."""


class Local(Backend):
    """The device at hand: steps are compiled to run, pieces of them are run and timed."""

    source = "measured"

    def compile(self, stage, traced) -> "concurrent.futures.Future[Built]":
        start = time.perf_counter()
        executable = stage.lower().compile()
        inner = getattr(executable, "compiled", executable)  # nnx.jit wraps JAX's executable
        compiled = read_compiled(inner, cost=False, seconds=time.perf_counter() - start)
        return _done(Built(compiled, executable))

    def explain(self, traced) -> tuple[Compiled, Peak]:
        start = time.perf_counter()
        executable, dumped = compile_dumped(traced.lower())
        return read_compiled(executable, False, time.perf_counter() - start), peak(dumped)

    def times(self, jobs: Sequence[Job]) -> list[Timing]:
        return measure_all(jobs)


class Deviceless(Backend):
    """A GPU that is not there: child processes compile for it, XLA estimates times for some.

    The same program always compiles to the same bytes, so a compile's result is remembered by the
    program's own text, and planning again costs no compile.
    """

    margin = DEVICELESS_MARGIN
    width = 2

    def __init__(self, target: Target, database: Database | None = None, workers: int = 2):
        super().__init__(target, database)
        self._compiler = Compiler(target, workers=workers)
        self._told = False
        self.source = "xla" if target.gpu is not None and target.gpu.priced else "roofline"

    def __exit__(self, *_) -> None:
        self._compiler.close()

    def compile(self, stage, traced) -> "concurrent.futures.Future[Built]":
        exported, donated = self._export(traced)
        self._tell_of_idle_devices(exported)
        device, program = str(self.target), _program_text(exported, donated)
        if (known := self.database.read_compile(device, program)) is not None:
            with contextlib.suppress(TypeError):  # written by another version of jaxmem
                return _done(Built(Compiled(**known)))
        result: concurrent.futures.Future[Built] = concurrent.futures.Future()

        def finish(future):
            if (error := future.exception()) is not None:
                result.set_exception(error)
                return
            compiled = future.result()
            result.set_result(Built(compiled))  # first: a warning of the database may be an error
            self.database.write_compile(device, program, dataclasses.asdict(compiled))

        self._compiler.submit(exported, donated=donated).add_done_callback(finish)
        return result

    def explain(self, traced) -> tuple[Compiled, Peak]:
        exported, donated = self._export(traced)
        self._tell_of_idle_devices(exported)
        return self._compiler.explain(exported, donated=donated)

    def estimate(self, traced: jax.stages.Traced) -> "concurrent.futures.Future[Compiled]":
        """The program with XLA's estimate of its time, `xla_seconds`, where XLA has one.

        Its bytes are not those of `compile`: it is compiled with other options.
        """
        exported, donated = self._export(traced)
        return self._compiler.submit(exported, donated=donated, cost=True)

    def times(self, jobs: Sequence[Job]) -> list[Timing] | None:
        if self.source != "xla":
            return None
        found = [f.result().xla_seconds for f in [self.estimate(job.trace()) for job in jobs]]
        times = [Timing(seconds) for seconds in found if seconds is not None]
        # one source for all, or none compare
        return times if len(times) == len(found) else None

    def _tell_of_idle_devices(self, exported: bytes) -> None:
        """Warns, once, where the target has devices and the step is sharded over none of them."""
        count = self.target.devices
        if count == 1 or self._told or export.deserialize(bytearray(exported)).nr_devices > 1:
            return
        self._told = True
        warn(
            f"jaxmem: the target {str(self.target)!r} has {count} devices, and the step is sharded"
            f" over none of them: bytes are those of one device, and the other {count - 1} would"
            " idle or repeat its work; give the arguments shardings over a mesh of"
            f" {count} devices, or plan for {self.target.name!r}"
        )

    def _export(self, traced: jax.stages.Traced) -> tuple[bytes, tuple[int, ...]]:
        return export_flat(traced, self.target.platform, self.target.compute_capability)


def backend_for(
    target: Target, database: Database | None = None, workers: int = 2
) -> Local | Deviceless:
    """The device at hand, or the processes that compile for a named one, `workers` at once.

    Raises TargetError where the wheels that compiling needs are not installed.
    """
    return Local(target, database) if target.local else Deviceless(target, database, workers)


def _done(built: Built) -> "concurrent.futures.Future[Built]":
    future: concurrent.futures.Future[Built] = concurrent.futures.Future()
    future.set_result(built)
    return future


def _program_text(exported: bytes, donated: tuple[int, ...]) -> bytes:
    """What decides a compile's result: the program, without where in the source it was written."""
    text = export.deserialize(bytearray(exported)).mlir_module()
    text = re.sub(r'loc\((#loc\d*|"[^"]*")\)|^#loc.*\n', "", text, flags=re.MULTILINE)
    return f"{donated} {text}".encode()
