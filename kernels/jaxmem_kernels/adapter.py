"""jax-triton, imported when a CUDA program first asks for a kernel; 0.3 and 0.4 spell a call
differently.
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
    """Whether jax-triton and Triton can be imported; if not, warns, once."""
    try:
        importlib.import_module("triton")
        importlib.import_module("jax_triton")
    except Exception as error:  # jax-triton also fails where its CUDA plugin does
        warnings.warn(_FALLBACK.format(error=f"{type(error).__name__}: {error}"), stacklevel=2)
        return False
    return True


def call(kernel, arrays, results, grid, capability: int, warps: int, **constants) -> tuple:
    """Runs a Triton kernel over `arrays`: pointers to them and to its `results` (shapes and
    dtypes), then `constants`.

    Products and sums are not contracted: what a kernel computes is its reference's to the last bit.
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
