"""Where steps are compiled and pieces of them are timed: on the device at hand, or without it.

Whatever differs between the two stands here.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import export

from jaxmem._core.database import Database, Timing
from jaxmem._core.versions import installed
from jaxmem._core.warn import warn
from jaxmem._target.buffers.assignment import on_core
from jaxmem._target.buffers.held_buffers import Peak
from jaxmem._target.buffers.peak import peak
from jaxmem._target.compile.options import options_of, tuned_alone
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.compile.running import CannotRun, StepRun, fits, in_turns, obstacle
from jaxmem._target.compile.timing import measure_all, measured_link
from jaxmem._target.compiled.compiled import (
    Compiled,
    check_arguments,
    check_transfers,
    read_compiled,
)
from jaxmem._target.compiled.dumped import compile_dumped
from jaxmem._target.compiled.tpu import compile_for_tpu
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.devices.rates import rates_of
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.kernels import kernel_flops
from jaxmem._trace.arguments import input_shardings, on_host, shard_bytes
from jaxmem._trace.export import export_flat
from jaxmem._trace.job import Job
from jaxmem._trace.step import described
from jaxmem.errors import StepError

T = TypeVar("T")
DEVICELESS_MARGIN = 0.04  # an H200's tuning chose matrix kernels that took up to 3.7 % more bytes
PROGRAM_MARGIN = 0.01  # a TPU's memory also holds the program, which has no buffer
LIBTPU_FLAGS = "LIBTPU_INIT_ARGS"
READING = 13  # the version of the reader of XLA's estimates; stored times of others are ignored


class Local(Backend):
    """The device at hand: steps are compiled to run, pieces of them are run and timed."""

    source = "measured"

    def compile_fully(self, stage, traced) -> "concurrent.futures.Future[Compiled]":
        # It compiles in the caller's thread: the future that it returns is done.
        check_arguments(self.target, traced)
        start = time.perf_counter()
        options = options_of(self.target.platform, traced)
        if self.target.platform == "tpu":
            compile = lambda dumps: stage.lower().compile(compiler_options=dumps)
            return _done(compile_for_tpu(compile, options, None)[0])
        asked = options | tuned_alone(self.target.platform)
        executable = stage.lower().compile(compiler_options=asked or None)
        compiled = self._read(executable, traced, time.perf_counter() - start, options)
        check_transfers(compiled, traced)
        return _done(compiled)

    def explain(self, traced) -> tuple[Compiled, Peak]:
        check_arguments(self.target, traced)
        start = time.perf_counter()
        options = options_of(self.target.platform, traced)
        if self.target.platform == "tpu":
            compile = lambda dumps: traced.lower().compile(compiler_options=dumps)
            compiled, dumped = compile_for_tpu(compile, options, None)
            return compiled, peak(dumped, leave_out=on_core)
        executable, dumped = compile_dumped(traced.lower(), options)
        compiled = self._read(executable, traced, time.perf_counter() - start, options)
        return compiled, peak(dumped)

    def _read(self, executable, traced, seconds: float, options: Mapping[str, Any]) -> Compiled:
        """Reads a compiled step. A CPU's analysis does not separate device memory from host memory:
        there, arguments in host memory are subtracted from the bytes of the device.
        """
        inner = getattr(executable, "compiled", executable)  # nnx.jit wraps JAX's executable
        compiled = read_compiled(inner, seconds, options=options)
        host = _hosted_bytes(inner, traced) if self.target.platform == "cpu" else 0
        return dataclasses.replace(
            compiled,
            total_bytes=compiled.total_bytes - host,
            argument_bytes=compiled.argument_bytes - host,
            host_bytes=compiled.host_bytes + host,
            executable=executable,
        )

    def times(self, jobs: Sequence[Job]) -> Sequence[Timing | None] | None:
        # Processes would have to run a piece on all of their devices equally often.
        if jax.process_count() > 1 and any(job.mesh is not None for job in jobs):
            return None
        return measure_all(jobs)

    @property
    def link(self) -> tuple[float, float]:
        return measured_link() or super().link

    def run(self, steps, traced, args, seconds) -> list[list[float]]:
        runs: dict[int, StepRun] = {}
        for i, step in enumerate(steps):
            if step.executable is None or not fits(step, self.target):
                continue
            run = StepRun(step.executable, args)
            if (why := obstacle(traced, run.given)) is not None:
                raise CannotRun(why)
            try:
                run()  # a first run, which is not counted
            except Exception as error:  # whatever it raises, the step can be planned
                raise CannotRun(f"running it raised {described(error)}") from error
            runs[i] = run
        found = dict(zip(runs, in_turns(list(runs.values()), seconds)))
        return [found.get(i, []) for i in range(len(steps))]


class Deviceless(Backend):
    """A GPU or TPU that is not there: child processes compile for it. For TPUs, and for some GPUs,
    times are estimated from what XLA fuses.

    The same program always compiles to the same bytes, so a compile's result is stored under the
    program's own text, and planning the same step again costs no compile.
    """

    parallel_compiles = 2

    def __init__(self, target: Target, database: Database | None = None, workers: int = 2):
        super().__init__(target, database)
        self.stops_at_buffers = target.platform == "tpu"
        # Of a TPU's programs XLA divides the kernels themselves.
        self.compiles_references = target.platform == "cuda"
        self.margin = PROGRAM_MARGIN if self.stops_at_buffers else DEVICELESS_MARGIN
        self._compiler = Compiler(target, workers=workers)
        self._told = False  # whether the user was warned of idle devices
        chip = target.chip
        self.source = "xla" if chip is not None and chip.has_xla_estimates else "roofline"

    def __exit__(self, *_) -> None:
        self._compiler.close()

    @property
    def device(self) -> str:
        # Estimates rest on the target's rates, which a calibration changes; a TPU's bytes on libtpu
        # too, and on the flags that it reads of the environment.
        rates = rates_of(self.target.chip) if self.target.chip else ""
        flags = os.environ.get(LIBTPU_FLAGS, "")
        libtpu = f" libtpu {installed('libtpu')} {flags}" if self.target.platform == "tpu" else ""
        return f"{super().device} {READING} {rates}{libtpu}"

    def compile_fully(self, stage, traced) -> "concurrent.futures.Future[Compiled]":
        return self._compiled(traced, assigned=False)

    def compile_buffers(self, stage, traced) -> "concurrent.futures.Future[Compiled]":
        return self._compiled(traced, assigned=self.stops_at_buffers)

    def _compiled(self, traced, assigned: bool) -> "concurrent.futures.Future[Compiled]":
        """Compiles a step in a child process, or returns the stored result of the same compile.

        assigned: whether the compile ends once buffers are assigned.
        """
        exported, donated = self._export(traced)
        self._tell_of_idle_devices(exported)
        options = options_of(self.target.platform, traced)
        device = f"{self.target} {self.device}{' assigned' if assigned else ''}"
        program = _program(exported, donated, options)
        result: concurrent.futures.Future[Compiled] = concurrent.futures.Future()
        # A stored result has all that a search reads; nothing could run here in any case.
        if (known := self.database.read_compile(device, program)) is not None:
            with contextlib.suppress(TypeError):  # written by another version of jaxmem
                _accept(result, Compiled(**known), traced)
                return result

        def finish(future):
            if (error := future.exception()) is not None:
                result.set_exception(error)
                return
            compiled = future.result()
            # The result comes first. Writing may raise where warnings are errors; `concurrent`
            # only logs what a callback raises, and `result` would wait for ever.
            _accept(result, compiled, traced)
            self.database.write_compile(device, program, compiled.stored())

        kernels = kernel_flops(traced.jaxpr.jaxpr)
        submitted = self._compiler.submit(
            exported, donated=donated, options=options, assigned=assigned, kernels=kernels
        )
        submitted.add_done_callback(finish)
        return result

    def explain(self, traced) -> tuple[Compiled, Peak]:
        exported, donated = self._export(traced)
        self._tell_of_idle_devices(exported)
        options = options_of(self.target.platform, traced)
        return self._compiler.explain(exported, donated=donated, options=options)

    def times(self, jobs: Sequence[Job]) -> Sequence[Timing | None] | None:
        if self.source != "xla":
            return None
        futures = []  # all are handed in before the first is waited for: workers share them
        for job in jobs:
            traced = job.trace()
            (exported, donated), kernels = self._export(traced), kernel_flops(traced.jaxpr.jaxpr)
            assigned, free = self.stops_at_buffers, job.mesh is not None
            submitted = self._compiler.submit(
                exported, donated=donated, assigned=assigned, kernels=kernels, free=free
            )
            futures.append(submitted)
        times = [Timing(s) for f in futures if (s := f.result().xla_seconds) is not None]
        # Times of different sources do not compare: all come from XLA, or none does.
        return times if len(times) == len(jobs) else None

    def _tell_of_idle_devices(self, exported: bytes) -> None:
        """Warns, once, where the target has several devices and the step is not sharded."""
        count = self.target.devices
        if count == 1 or self._told or export.deserialize(bytearray(exported)).nr_devices > 1:
            return
        self._told = True
        # A chip of some TPUs is two devices.
        one = self.target.name if Target.parse(self.target.name).devices == 1 else None
        warn(
            f"jaxmem: the target {str(self.target)!r} has {count} devices, and the step is sharded"
            f" over none of them: bytes are those of one device, and the other {count - 1} would"
            " idle or repeat its work; give the arguments shardings over a mesh of"
            f" {count} devices{f', or plan for {one!r}' if one else ''}"
        )

    def _export(self, traced: jax.stages.Traced) -> tuple[bytes, tuple[int, ...]]:
        """Returns the exported step for the target, and the indices of its donated arguments."""
        check_arguments(self.target, traced)
        return export_flat(traced, self.target.platform, self.target.compute_capability)


def backend_for(
    target: Target, database: Database | None = None, workers: int = 2
) -> Local | Deviceless:
    """Returns the backend of the device at hand, or one whose `workers` child processes compile for
    a named device.

    Raises TargetError where the wheels that compiling needs are not installed.
    """
    return Local(target, database) if target.local else Deviceless(target, database, workers)


def _done(result: T) -> "concurrent.futures.Future[T]":
    """Returns a future that has its result already."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_result(result)
    return future


def _hosted_bytes(executable: jax.stages.Compiled, traced: jax.stages.Traced) -> int:
    """Bytes of a compiled step's arguments in host memory, of one device."""
    return sum(
        shard_bytes(aval, sharding)
        for aval, sharding in zip(traced.jaxpr.in_avals, input_shardings(executable))
        if sharding is not None and on_host(aval)
    )


def _accept(future: "concurrent.futures.Future[Compiled]", compiled: Compiled, traced) -> None:
    """Sets the result of a deviceless compile, or the error of `check_transfers`."""
    try:
        check_transfers(compiled, traced)
        future.set_result(compiled)
    except StepError as error:
        future.set_exception(error)


def _program(exported: bytes, donated: tuple[int, ...], options: dict) -> bytes:
    """What decides a compile's result; locations in the user's source do not."""
    # MLIR names a location in the source as `loc(#loc7)` or `loc("...")` after an operation, and
    # defines it in a line `#loc7 = ...`. Without them a step that moved in its file is found
    # again.
    text = export.deserialize(bytearray(exported)).mlir_module()
    text = re.sub(r'loc\((#loc\d*|"[^"]*")\)|^#loc.*\n', "", text, flags=re.MULTILINE)
    return f"{donated} {options or ''} {text}".encode()
