"""Deviceless compilation for GPUs: the description of a GPU, and the work of a compiling process.

XLA:GPU needs no GPU to compile: the CUDA plugin's two wheels, a description of the device and
NVIDIA's assembler give its real buffer assignment. Nothing is autotuned there. By default XLA takes
Triton for products, and fuses with a product what decodes or converts its operands. The tuning on
an H200 took the library's kernels for many of these products, which read operands from memory: six
of fourteen measured steps took up to 3.7 % more bytes than compiled with Triton, and the others
took the same bytes. A plan leaves a margin for this.

The alternative is to compile with the library's kernels (`xla_gpu_enable_triton_gemm=False`). These
compiles are 5.0 % below to 1.3 % above the bytes on the H200 (`benchmarks/gpu.py`, `gpu_bytes`):
three plans that Triton's compile predicts exactly have about 0.2 GB less, as much as one attention
matrix. Each product also has 4 MiB of workspace, which dominates tiny steps. The greater of both
compiles is 0.8 % below to 1.3 % above, for the time of a second compile.

XLA's list of autotuning backends (`xla_gpu_experimental_autotune_backends`) cannot choose the
library's kernels for Triton's fusions without a GPU: in JAX 0.11.2 the backend that divides the
fusions (`CUBLASLT_FISSION`) has no default configuration.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from jaxmem._target.buffers.peak import peak
from jaxmem._target.compiled.compiled import read_compiled
from jaxmem._target.compiled.dumped import compile_dumped
from jaxmem._target.devices.chips import Gpu, target_config
from jaxmem._target.devices.rates import LINK_EFFICIENCY, Rates, rates_of
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.links import Links

# XLA writes its estimates into the program's text; the program is the same.
COST_OPTIONS = {"xla_gpu_collect_cost_model_stats": True}


def described(target: Target, gpu: Gpu) -> dict[str, Any]:
    """What a compiling process needs to know of a GPU, as JSON's kind of data."""
    return {
        "platform": "cuda",
        "config": target_config(gpu),
        "count": target.devices,
        "rates": dataclasses.asdict(rates_of(gpu)) if gpu.has_xla_estimates else None,
        "links": dataclasses.asdict(links(target, gpu)) if target.devices > 1 else None,
    }


def links(target: Target, gpu: Gpu) -> Links:
    """Returns the links between the devices of a target, at the rates that copies reach."""
    each = target.devices // target.hosts
    rates = LINK_EFFICIENCY * gpu.peers, LINK_EFFICIENCY * gpu.network
    return Links(target.devices, each, *rates)


def devices(device: Mapping[str, Any]) -> list[Any]:
    """Returns devices of one host. `described` has their number and their kind (a
    `GpuTargetConfigProto` in text form).
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="cuda",
        topology=f"1x1x{device['count']}",
        target_config=device["config"],
    )
    return list(topology.devices)


def compiled(lowered: jax.stages.Lowered, header: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a step, and returns the fields of `Compiled`, with XLA's estimate of its time where
    it has one for the device.

    header: the request.
    """
    start, options, rates = time.perf_counter(), dict(header["options"]), header["device"]["rates"]
    rates = Rates(**rates) if rates else None
    between = header["device"]["links"]
    try:
        made = lowered.compile(
            compiler_options=(COST_OPTIONS | options if rates else options) or None
        )
    except jax.errors.JaxRuntimeError as error:
        # XLA has no table of rates for this device: it compiles without estimates.
        if not (rates and "Cannot find key" in str(error)):
            raise
        rates, made = None, lowered.compile(compiler_options=options or None)
    peers = Links(**between) if between else None
    read = read_compiled(made, time.perf_counter() - start, rates, options, peers)
    return {"compiled": read.stored()}


def explained(lowered: jax.stages.Lowered, header: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a step without estimates, and returns the fields of `Compiled` and of `Peak`."""
    start, options = time.perf_counter(), dict(header["options"])
    made, dumped = compile_dumped(lowered, options)
    read = read_compiled(made, time.perf_counter() - start, options=options)
    return {"compiled": read.stored(), "peak": dataclasses.asdict(peak(dumped))}
