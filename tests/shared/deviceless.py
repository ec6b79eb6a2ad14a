"""Compiles functions for absent GPUs, and returns the facts of the compiled programs."""

import jax
import jax.numpy as jnp

from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.deviceless.gpu import devices as devices_of
from jaxmem._target.devices.chips import target_config
from jaxmem._target.devices.target import Target
from jaxmem._trace.export import export_flat

M, D = 256, 128  # rows, and features


def spec(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def devices(name: str = "h200", count: int = 1) -> list:
    """Returns GPUs that are absent, in a compiler's environment."""
    return devices_of({"config": target_config(Target.parse(name).gpu), "count": count})


def submit(compiler, function, *args, donate=(), **options):
    exported, donated = export_flat(jax.jit(function, donate_argnums=donate).trace(*args), "cuda")
    return compiler.submit(exported, donated=donated, **options)


def result(*args, **options) -> Compiled:
    return submit(*args, **options).result(timeout=120)
