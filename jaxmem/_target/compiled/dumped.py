"""Compiles a step, and takes what XLA dumps of it: its optimized module and its buffers."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxmem.errors import StepError


def compile_dumped(
    lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None
) -> tuple[jax.stages.Compiled, bytes]:
    """Compiles a step, and returns it with the `HloProto` that XLA dumped: its optimized module and
    its buffer assignment.

    options: XLA's compile options; the options for the dump are added.

    A dump is needed because JAX's memory analysis holds no buffer assignment for a device that is
    not there, and on a CPU one without its history. Raises StepError if XLA dumps none.
    """
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as folder, without_cache():
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
            | dict(options or {})
        )
        found = sorted(
            pathlib.Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda f: f.stat().st_size
        )
        if not found:
            raise StepError(
                "explain: XLA dumped no buffer assignment of the compiled step on this platform;"
                " explain it for a named GPU instead, such as target='h200'"
            )
        return compiled, found[-1].read_bytes()  # the smaller ones are kernels that were tried


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turns JAX's compilation cache off: a step that comes out of it is not compiled, and so not
    dumped.
    """
    # JAX decides once whether the cache is used. Only a reset makes it look at the setting again.
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
