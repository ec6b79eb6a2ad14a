"""What one compile of a step says: bytes by XLA's buffer assignment, matrix products, XLA's own
estimate of time.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxmem._device.rates import Rates
from jaxmem._xla.hlo import hlo_costs
from jaxmem.errors import StepError


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one compile gave, for one device. `total_bytes` is temp + arguments + outputs − aliased,
    in device memory; host memory is apart.

    `matmul_flops` and `matmuls` are of one execution, loops times their trip counts. `xla_seconds`
    is XLA's estimate of one execution, None where it was not asked for or XLA has none for this
    device.
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


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Device bytes of a compiled step: arguments, temporaries and outputs, less what is aliased.

    This is what a budget limits. `compiled` is what `jax.jit(step).lower(*args).compile()` returns.
    Raises StepError where the platform has no memory analysis.
    """
    memory: Any = _memory(compiled)
    device = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return device + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _memory(compiled: jax.stages.Compiled):
    if (memory := compiled.memory_analysis()) is None:
        raise StepError(
            "the compiled step has no memory analysis on this platform, so its bytes cannot be"
            " known; plan for a named GPU instead, such as target='h200'"
        )
    return memory


def read_compiled(
    compiled: jax.stages.Compiled, cost: bool, seconds: float, rates: Rates | None = None
) -> Compiled:
    """Reads `compiled`; with `cost` its estimate too, mended by `rates`. `seconds` is what
    compiling took.

    `peak_memory_in_bytes` is not used: it leaves temporaries out on a CPU and mixes host memory in
    on a GPU.
    """
    memory = _memory(compiled)
    costs = hlo_costs(compiled.as_text() or "", rates if cost else None)
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
        xla_seconds=costs.seconds if cost else None,
        matmul_flops=costs.matmul_flops,
        matmuls=costs.matmuls,
        compile_seconds=seconds,
    )


def compile_dumped(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bytes]:
    """The step, compiled as ever, and the `HloProto` that XLA dumped of it: optimized module and
    buffer assignment.

    A memory analysis holds no buffer assignment for a device that is not there, and on a CPU one
    without its history. Raises StepError if XLA dumps none.
    """
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as folder, _without_cache():
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        )
        found = sorted(
            pathlib.Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda f: f.stat().st_size
        )
        if not found:
            raise StepError(
                "explain: XLA dumped no buffer assignment of the compiled step on this platform;"
                " explain it for a named"
                " GPU instead, such as target='h200'"
            )
        return compiled, found[-1].read_bytes()  # the smaller ones are kernels that were tried


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """A step out of JAX's compilation cache is not compiled, and so not dumped."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
