"""Facts of one compiled step: bytes by XLA's buffer assignment, matrix products, XLA's own estimate
of time.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem._target.devices.rates import Rates
from jaxmem._target.devices.support import host_loop_fault
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.costs import hlo_costs
from jaxmem._target.hlo.links import Links
from jaxmem._target.hlo.transfers import Transfer, fault, misplaced, transfers
from jaxmem._trace.arguments import on_host
from jaxmem.errors import StepError, TargetError


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Facts read from one compiled step. Bytes are for one device.

    total_bytes: temp + arguments + outputs − aliased, in device memory. A budget limits it.
    argument_bytes: of the arguments.
    temp_bytes: of the temporaries' allocations.
    output_bytes: of the outputs, aliased outputs included.
    alias_bytes: of outputs in the memory of donated arguments.
    host_bytes: temp + arguments + outputs − aliased, in host memory.
    xla_seconds: XLA's estimate of one execution, without copies to host memory and back; None
      where XLA has none for this device.
    host_seconds: seconds in which kernels wait for copies to host memory and back, by the compiled
      schedule; None where it is not known.
    matmul_flops: of the matrix products of one execution, loops times their trip counts.
    matmuls: how many matrix products one execution runs.
    compile_seconds: what compiling took.
    transfers: what moves data to host memory and back, on a GPU.
    options: XLA's compile options that it was asked for with.
    misplaced: the types of results that share a buffer with an argument in another memory.
    executable: the compiled step, to be called as the step is; None for a device that is not at
      hand, and for a compile that was stored.
    """

    total_bytes: int
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    host_bytes: int
    xla_seconds: float | None
    matmul_flops: int
    matmuls: int
    compile_seconds: float
    transfers: tuple[Transfer, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    misplaced: tuple[str, ...] = ()
    host_seconds: float | None = None
    executable: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        # What was written as JSON, and is read again, are dicts.
        made = [Transfer(**t) if isinstance(t, dict) else t for t in self.transfers]
        object.__setattr__(self, "transfers", tuple(made))
        object.__setattr__(self, "misplaced", tuple(self.misplaced))

    def stored(self) -> dict[str, Any]:
        """The fields as JSON takes them, all but the executable; `Compiled` reads them again."""
        data = dataclasses.asdict(dataclasses.replace(self, executable=None))
        del data["executable"]
        return data


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the device bytes of a compiled step.

    The bytes are arguments + temporaries + outputs − aliased outputs. A budget limits these bytes.

    compiled: the compiled step, which `jax.jit(step).lower(*args).compile()` returns.

    Raises StepError if the step is not compiled, and if the platform has no memory analysis.
    """
    memory: Any = _memory(compiled)
    device = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return device + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _memory(compiled: jax.stages.Compiled):
    """Returns XLA's memory analysis of a compiled step. Raises StepError if there is none."""
    if not hasattr(compiled, "memory_analysis"):
        raise StepError(
            f"compiled_bytes: `compiled` is {type(compiled).__name__}; expected a compiled step:"
            " jax.jit(step).lower(*args).compile()"
        )
    if (memory := compiled.memory_analysis()) is None:
        raise StepError(
            "the compiled step has no memory analysis on this platform, so its bytes cannot be"
            " known; plan for a named GPU instead, such as target='h200'"
        )
    return memory


def read_compiled(
    compiled: jax.stages.Compiled,
    seconds: float,
    rates: Rates | None = None,
    options: Mapping[str, Any] | None = None,
    links: Links | None = None,
) -> Compiled:
    """Reads a compiled step.

    compiled: the step.
    seconds: what compiling took.
    rates: the device's, which replace what XLA is known to estimate wrongly (`hlo_costs`); None if
      it was compiled without estimates.
    options: XLA's compile options that it was asked for with.
    links: between the devices; None for one device.

    Raises StepError where the platform has no memory analysis.
    """
    # `peak_memory_in_bytes` is not used: it leaves temporaries out on a CPU, and mixes host memory
    # in on a GPU.
    memory = _memory(compiled)
    text = compiled.as_text() or ""
    costs = hlo_costs(text, rates, links if rates else None)
    return Compiled(
        total_bytes=compiled_bytes(compiled),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes
        + memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes,
        xla_seconds=costs.seconds if rates else None,
        matmul_flops=costs.matmul_flops,
        matmuls=costs.matmuls,
        compile_seconds=seconds,
        transfers=transfers(text),
        options=dict(options or {}),
        misplaced=misplaced(text),
        host_seconds=costs.host_seconds if rates else None,
    )


def check_arguments(target: Target, traced: jax.stages.Traced) -> None:
    """Raises TargetError if a step has arguments in host memory, and its loops may transfer wrong
    values on the target.
    """
    if not any(map(on_host, traced.jaxpr.in_avals)):
        return
    if (why := host_loop_fault(target)) is not None:
        raise TargetError(
            f"the step has arguments in host memory, and on target {str(target)!r} {why}, or leave"
            " all layers in device memory: plan without 'states' in `decide`"
        )


def check_transfers(compiled: Compiled, traced: jax.stages.Traced) -> None:
    """Raises StepError if a step with arguments in host memory moves them in a way that takes many
    times as long as a copy, or if a result takes the buffer of an argument in another memory.
    """
    if not any(map(on_host, traced.jaxpr.in_avals)):
        return
    # Remove with a fix: JAX pairs without comparing memories if one of them is unknown to JAX.
    if compiled.misplaced:
        raise StepError(
            "the step's results do not stay in the memory of the arguments whose buffers they take:"
            f" {', '.join(compiled.misplaced)} is in host memory on one side and in device memory"
            " on the other; JAX pairs donated arguments with results of one shape and dtype in"
            " order, whatever their memory; expected the state's arrays first and in the order of"
            " the arguments: return (state, metrics), with no metric before the state"
        )
    if (what := fault(compiled.transfers)) is not None:
        raise StepError(
            f"the step's arguments in host memory are not moved by copies alone: {what}; expected"
            " a copy a layer, as jaxmem.released_step makes them with jaxlib 0.11.1 or later; leave"
            " more layers in device memory, or all"
        )
