"""Compiles for TPUs that the machine does not have: the description of a TPU that a compiling
process receives, and the compile itself. libtpu's compiler needs no TPU.

A compile that only has to assign buffers is ended by an operation that libtpu does not know. libtpu
assigns buffers before it generates code, code generation takes most of the time, and no option of
libtpu stops between the two. A custom call of an unknown name fails only when code is generated. It
changes the step's bytes by 12 KiB. The bytes and the costs of the step are known in a tenth of the
time or less.

The alternative is a smaller memory limit, which also ends a compile at that point. But the compiler
first rematerializes values to get below the limit, and assigns the buffers of another program.
For the same reason, rematerialization is switched off in a compile for buffers: if the device does
not hold a step, the search has to learn the bytes of the step as it was written.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxmem._target.buffers.assignment import on_core
from jaxmem._target.buffers.peak import peak
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.compiled.tpu import compile_for_tpu
from jaxmem._target.devices.chips import Topology
from jaxmem._target.devices.rates import LINK_EFFICIENCY, rates_of
from jaxmem._target.hlo.roofline import TpuRates

_STOP = "jaxmem_stop"  # no operation that anyone knows
# If a step takes more memory than the device has, XLA rematerializes values, for minutes. Nobody
# runs such a step, and a search needs the bytes of the step as it is written.
_AS_WRITTEN = {"xla_tpu_rematerialization_min_size_in_bytes": str(2**40)}
_TILE = 8, 128  # of 32-bit numbers: the compiler fails on less


def described(topology: Topology) -> dict[str, Any]:
    """What a compiling process needs to know of a slice of TPUs, as JSON's kind of data."""
    tpu = topology.tpu
    return {
        "platform": "tpu",
        "topology": topology.name,
        "host": list(topology.host),
        "config": tpu.chip_config,
        "rates": dataclasses.asdict(rates(topology)),
    }


def rates(topology: Topology) -> TpuRates:
    """Returns what programs for a slice are priced by."""
    found, ring = rates_of(topology.tpu), LINK_EFFICIENCY * topology.ring
    # Of a chip alone, whose two devices share one memory, there are no links.
    neighbours = 2 * LINK_EFFICIENCY * topology.tpu.link if topology.chips > 1 else ring
    vector = topology.tpu.vector_ops
    return TpuRates(found.bandwidth, found.flops_16bit, vector, ring, neighbours)


def devices(device: Mapping[str, Any]) -> list[Any]:
    """Returns the devices of the slice that `described` describes."""
    config = {"chip_config_name": device["config"]} if device["config"] else {}
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=device["topology"],
        chips_per_host_bounds=tuple(device["host"]),
        **config,
    )
    return list(topology.devices)


def with_stop(step: Callable[..., Any]) -> Callable[..., tuple]:
    """The step with an additional operation, which ends a compile before code is generated. Its
    bytes are the step's bytes to within 12 KiB.
    """

    def stopped(*args):
        stop = jax.ffi.ffi_call(_STOP, jax.ShapeDtypeStruct(_TILE, jnp.float32))
        return (*step(*args), stop(jnp.zeros(_TILE, jnp.float32)))

    return stopped


def compiled(lowered: jax.stages.Lowered, header: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a step, and returns the fields of `Compiled`. `header` is the request."""
    return {"compiled": _compiled(lowered, header)[0].stored()}


def explained(lowered: jax.stages.Lowered, header: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a step, and returns the fields of `Compiled` and of `Peak`."""
    read, dumped = _compiled(lowered, header)
    held = peak(dumped, leave_out=on_core)
    return {"compiled": read.stored(), "peak": dataclasses.asdict(held)}


def _compiled(lowered: jax.stages.Lowered, header: Mapping[str, Any]) -> tuple[Compiled, bytes]:
    """Compiles a step for a TPU; also returns the `HloProto` that the result was read from."""
    own = _AS_WRITTEN if header.get("assigned") else {}
    ended = f"emitter for {_STOP} not found"
    compile = lambda dumps: lowered.compile(compiler_options=dumps | own)
    rates = TpuRates(**header["device"]["rates"])
    kernels = header.get("kernels", ())
    return compile_for_tpu(compile, header["options"], rates, ended, kernels)
