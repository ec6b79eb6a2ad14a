"""Packs and quantizes arrays: by GPU kernels where a program runs on CUDA, and by their references
in jax.numpy elsewhere.

Importing this package imports no JAX: names are looked up in `_public.py` when they are first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxmem_kernels._public import *  # noqa: F403


def __getattr__(name: str):
    """Python calls this function for a name that the package does not hold yet."""
    if not name.startswith("_"):
        from jaxmem_kernels import _public

        if hasattr(_public, name):
            return getattr(_public, name)
    raise AttributeError(f"module 'jaxmem_kernels' has no attribute {name!r}")
