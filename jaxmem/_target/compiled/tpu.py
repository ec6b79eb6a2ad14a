"""Compiles a step for a TPU, and reads its bytes from its buffers.

The bytes come from the `HloProto` that the compiler dumps, and from the buffer assignment in it.
The compiler compares the same assignment with the device's memory. In the dump, each allocation has
the colour of its memory: the device's, the cores' or the host's.

JAX's memory analysis was the first choice. It counts VMEM, the memory of the cores, among the
temporaries, so a plan would be compared with memory that the step does not take. It also has no
buffers, which `explain` names.
"""

import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmem._target.buffers.assignment import bytes_of_memories
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.compiled.dumped import without_cache
from jaxmem._target.hlo.roofline import TpuRates, tpu_costs
from jaxmem.errors import StepError

_NO_ROOM = "Ran out of memory on HBM"
_PROTO, _TEXT = "*after_optimizations.hlo.pb", "*after_optimizations.txt"


def compile_for_tpu(
    compile: Callable[[dict[str, Any]], Any],
    options: Mapping[str, Any],
    rates: TpuRates | None,
    ended: str = _NO_ROOM,
    kernels: Sequence[Sequence] = (),
) -> tuple[Compiled, bytes]:
    """Compiles a step, and returns the facts read from it, and the `HloProto` that holds them.
    The executable is None if the step takes more memory than the device has. Its bytes and costs
    are known even so, since buffers are assigned before.

    compile: given XLA's options, compiles the step.
    options: XLA's compile options; the options for the dump are added.
    rates: the rates for the estimate of time; None for no estimate.
    ended: words of another error that comes after the buffers' assignment.
    kernels: the work of its Pallas kernels, as `kernel_flops` returns it.
    """
    start, made = time.perf_counter(), None
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as folder, without_cache():
        dumps = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
        try:
            made = compile(dumps | dict(options))
        except jax.errors.JaxRuntimeError as error:
            if not any(words in str(error) for words in (_NO_ROOM, ended)):
                raise
        proto, text = (_largest(folder, pattern) for pattern in (_PROTO, _TEXT))
    seconds = time.perf_counter() - start
    costs = tpu_costs(text.decode(), rates or TpuRates(1.0, 1.0, 1.0, 0.0, 0.0), kernels)
    read = Compiled(
        **bytes_of_memories(proto),
        xla_seconds=costs.seconds if rates else None,
        matmul_flops=costs.matmul_flops,
        matmuls=costs.matmuls,
        compile_seconds=seconds,
        options=dict(options),
        executable=made,
    )
    return read, proto


def _largest(folder: str, pattern: str) -> bytes:
    """The largest dump of a name, which is the step's; others are of small programs that it needs.

    Raises StepError where there is none.
    """
    found = sorted(pathlib.Path(folder).glob(pattern), key=lambda f: f.stat().st_size)
    if not found:
        raise StepError(
            f"XLA dumped no {pattern.lstrip('*.')} of the step for the TPU, which its bytes are"
            " read from; expected one from the libtpu that jax asks for: install it with"
            " pip install 'jaxmem[tpu]'"
        )
    return found[-1].read_bytes()
