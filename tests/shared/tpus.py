"""Compiles functions for absent TPUs, in the process that imports this file. libtpu reads its
environment when it is loaded, so import this file before any device is requested.
"""

import functools
import os

from jaxmem._core.quiet import LIBTPU

os.environ |= LIBTPU | {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_LOG_DIR": "disabled",
}

import jax
import numpy as np
from jax import export
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem._target.deviceless.tpu import described
from jaxmem._target.deviceless.tpu import devices as devices_of
from jaxmem._target.devices.chips import TPUS, topology_of


@functools.cache
def devices(name: str, chips: int = 1) -> list:
    """Returns the devices of `chips` chips of a TPU, such as "v5e"."""
    return devices_of(described(topology_of(TPUS[name], str(chips))))


def compiled(function, arguments, name: str, free: tuple[bool, bool] = (False, False)):
    """Compiles `function(*arguments)` for one device of a TPU, as a plan does: exported first.

    arguments: shapes and dtypes.
    free: whether XLA chooses the layouts of the arguments, and of the results, as it does within a
      step. Otherwise their layouts are a program's default layouts.
    """
    exported = export.export(jax.jit(function), platforms=["tpu"])(*arguments)
    one = NamedSharding(Mesh(np.array(devices(name)[:1]), ("device",)), PartitionSpec())
    into, out = (Format(Layout.AUTO, one) if any_order else one for any_order in free)
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
    return jax.jit(exported.call, in_shardings=into, out_shardings=out).lower(*arguments).compile()
