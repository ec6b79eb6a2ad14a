"""Compiles functions for absent GPUs, and returns the facts of the compiled programs."""

import jax
import jax.numpy as jnp

from jaxmem._target.compiled.compiled import Compiled
from jaxmem._trace.export import export_flat

M, D = 256, 128  # rows, and features


def spec(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def submit(compiler, function, *args, donate=(), **options):
    exported, donated = export_flat(jax.jit(function, donate_argnums=donate).trace(*args), "cuda")
    return compiler.submit(exported, donated=donated, **options)


def result(*args, **options) -> Compiled:
    return submit(*args, **options).result(timeout=120)
