"""Calls jax-triton, whose versions 0.3 and 0.4 spell a call differently. It is imported when a CUDA
program first asks for a kernel.
"""

import functools
import importlib
import inspect
import warnings
from typing import Any

_FALLBACK = (
    "jaxmem's GPU kernels are not used: {error}. Codecs run as XLA compiles their references. "
    "Install them with: pip install 'jaxmem[gpu]'"
)


@functools.cache
def is_there() -> bool:
    """Whether jax-triton and Triton can be imported; if not, warns, and by its cache only once."""
    try:
        importlib.import_module("triton")
        importlib.import_module("jax_triton")
    except Exception as error:  # jax-triton also fails where its CUDA plugin does
        warnings.warn(_FALLBACK.format(error=f"{type(error).__name__}: {error}"), stacklevel=2)
        return False
    return True


def call(kernel, arrays, results, grid, capability: int, warps: int, **constants) -> tuple:
    """Runs a Triton kernel, and returns its results.

    kernel: takes pointers to `arrays` and to its results, in this order, then `constants`.
    arrays: what it reads; Python numbers are passed by value.
    results: shapes and dtypes of what it writes.
    grid: how many programs run along each axis.
    capability: the GPU's compute capability, such as 90.
    warps: how many warps of 32 threads a program has.
    constants: what the kernel is compiled for, by name.

    Products and sums are not contracted, so that a kernel equals its reference to the last bit.
    """
    jax_triton: Any = importlib.import_module("jax_triton")
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        spelled = {"out_type": results, "backend_options": {"enable_fp_fusion": False}}
    else:
        spelled = {"out_shape": results, "enable_fp_fusion": False}
    found = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        grid=grid,
        compute_capability=capability,
        num_warps=warps,
        **spelled,
        **constants,
    )
    return tuple(found)
