"""Calls jax-triton, whose versions 0.3 and 0.4 have different parameters and custom calls.
jax-triton is imported when a CUDA program first needs a kernel.
"""

import contextlib
import functools
import importlib
import inspect
import warnings
from typing import Any

import jax

# The custom calls of kernels in compiled programs. Other names of jax-triton 0.3 are in `call`.
# Remove with jax-triton 0.3: its custom call, the first.
CUSTOM_CALLS = ("triton_kernel_call", "triton_kernel_call_ffi")
_FALLBACK = (
    "jaxmem's GPU kernels are not used: {error}. Codecs run as XLA compiles their references. "
    "Install them with: pip install 'jaxmem[gpu]'"
)


@functools.cache
def is_there() -> bool:
    """Whether jax-triton and Triton can be imported. If not, warns once."""
    try:
        importlib.import_module("triton")
        importlib.import_module("jax_triton")
    except Exception as error:  # jax-triton also fails if its CUDA plugin fails
        warnings.warn(_FALLBACK.format(error=f"{type(error).__name__}: {error}"), stacklevel=2)
        return False
    return True


def call(kernel, arrays, results, grid, capability: int, warps: int, **constants) -> tuple:
    """Runs a Triton kernel, and returns its results.

    kernel: takes pointers to `arrays` and to its results, in this order, then `constants`.
    arrays: the operands; Python numbers are passed by value.
    results: the shapes and dtypes of the results.
    grid: number of programs along each axis.
    capability: the GPU's compute capability, such as 90.
    warps: number of warps of 32 threads of a program.
    constants: the compile-time constants of the kernel, by name.

    Products and sums are not contracted, so that a kernel equals its reference to the last bit.
    """
    jax_triton: Any = importlib.import_module("jax_triton")
    # Remove with jax-triton 0.3: the parameters `out_shape` and `enable_fp_fusion`.
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        spelled = {"out_type": results, "backend_options": {"enable_fp_fusion": False}}
    else:
        spelled = {"out_shape": results, "enable_fp_fusion": False}
    # Remove with jax-triton 0.4: without 64-bit types, it refuses the size of a large tensor.
    large = any(isinstance(a, int) and a >= 2**31 for a in arrays)
    with jax.enable_x64(True) if large else contextlib.nullcontext():
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
