"""Steps on meshes of 8 to 256 GPUs that the machine does not have: bytes of a device, predicted
without a compile and compiled, and the transfers between devices.

    python -m benchmarks.slices [RESULT ...]

The models are the configs `gpt_20b_h100x16` and `llama_13b_v5e_16x16` with 8 layers of a width of
2048, over a mesh with the axes data, fsdp and tensor. Each part of the batch has two sequences of
1024 tokens. With tensor parallelism, the activations between layers are divided along the sequence.

`slice_bytes`: 20 points of a model, a mesh and a target. The layers keep the result of attention
and the residual after it, and recompute all else. `estimated` are the bytes of
`jaxmem.plans.estimate`, without a compile; `scalar` is the same estimate if every value is divided
by the devices that divide the batch, as it was before; `compiled` are XLA's.

`slice_seconds`: CPU seconds for one model on 1 to 256 devices, fully sharded with two sequences
each: of tracing the step and estimating its bytes, the least of three; and of a process that
compiles it. The machine does other work, so that the clock says little.

`slice_steps`: the two configs at their full size on `h200:8x2`, over two meshes each, with every
layer recomputed: bytes of a device; collectives of one step by kind, how often they run, and the
bytes of the larger of their operands and results; predicted seconds and tokens a second. `alone`
are the predicted seconds without the waiting for other devices, `thin` with a tenth of the network
between hosts.
"""

import dataclasses
import functools
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from benchmarks.shared.case import on
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.searches import own_cache
from experiments.command.load import load
from experiments.running.planning import over_devices
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import KEEP
from jaxmem._target.compile.options import options_of
from jaxmem._target.compiled.compiled import compiled_bytes
from jaxmem._target.deviceless import gpu
from jaxmem._target.deviceless.worker import deviceless_mesh
from jaxmem._target.devices.rates import rates_of
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.collectives import is_collective, kind_of
from jaxmem._target.hlo.costs import hlo_costs
from jaxmem._target.hlo.text import HloModule, Instruction
from jaxmem._trace.arguments import argument_bytes, shards_of
from jaxmem._trace.export import export_flat
from jaxmem._trace.liveness import walk
from jaxmem._trace.step import trace
from jaxmem.plans import Assignment

GPT, LLAMA = "gpt_20b_h100x16", "llama_13b_v5e_16x16"
SMALL = (
    "model.layers=8", "model.width=2048", "model.heads=16", "model.vocab=16384",
    "train.sequence=1024",
)  # fmt: skip
MORE = {GPT: (), LLAMA: ("model.hidden=5632",)}
# (config, data, fsdp, tensor, target)
POINTS = (
    (GPT, 8, 1, 1, "h200:8"),
    (GPT, 1, 8, 1, "h100-80gb:8"),
    (GPT, 1, 1, 8, "h200:8"),
    (LLAMA, 8, 1, 1, "h100-80gb:8"),
    (LLAMA, 1, 1, 8, "h200:8"),
    (LLAMA, 2, 2, 2, "h200:8"),
    (GPT, 2, 8, 1, "h100-80gb:8x2"),
    (GPT, 1, 4, 4, "h200:8x2"),
    (LLAMA, 1, 16, 1, "h200:8x2"),
    (LLAMA, 1, 4, 4, "h200:8x2"),
    (GPT, 4, 8, 1, "h200:8x4"),
    (LLAMA, 2, 4, 4, "h100-80gb:8x4"),
    (GPT, 4, 8, 2, "h200:8x8"),
    (LLAMA, 1, 64, 1, "h100-80gb:8x8"),
    (GPT, 1, 16, 8, "h100-80gb:8x16"),
    (LLAMA, 1, 16, 8, "h200:8x16"),
    (GPT, 4, 8, 8, "h100-80gb:8x32"),
    (GPT, 1, 256, 1, "h200:8x32"),
    (LLAMA, 1, 64, 4, "h200:8x32"),
    (LLAMA, 8, 8, 4, "h100-80gb:8x32"),
)
KEPT = Assignment({"block": {"attn": KEEP, "mid": KEEP}})


def config_of(name: str, data: int, fsdp: int, tensor: int, *sizes: str):
    mesh = f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}"
    sequence = f"mesh.sequence={'false' if tensor == 1 else 'true'}"
    batch = f"train.batch={2 * data * fsdp}"
    return load(name, [*sizes, *mesh, sequence, batch])


def traced_on(config, target: str, plan: Assignment):
    """The step's stage, its trace and its arguments, over the config's mesh."""
    with over_devices(config, target):
        args = abstract(config)
        return *trace(functools.partial(make_step, config), plan, args), args


def point(name: str, data: int, fsdp: int, tensor: int, target: str) -> dict[str, Any]:
    """The bytes of one point, estimated and compiled."""
    config = config_of(name, data, fsdp, tensor, *SMALL, *MORE[name])
    stage, traced, args = traced_on(config, target, KEPT)
    devices = Target.parse(target).devices
    arguments, shards = argument_bytes(traced, args, devices), shards_of(traced, args, devices)
    with on(target) as backend:
        estimated = arguments + backend.temporary_bytes(traced, shards, args=args)
        with mock.patch.object(walk, "divide", return_value=None):
            scalar = arguments + backend.temporary_bytes(traced, shards, args=args)
        compiled = backend.compile_buffers(stage, traced).result().total_bytes
    return {
        "devices": devices,
        "arguments": arguments,
        "estimated": estimated,
        "scalar": scalar,
        "compiled": compiled,
        "ratio": estimated / compiled,
        "scalar ratio": scalar / compiled,
    }


def of_bytes(report: Report) -> dict[str, Any]:
    """The relative errors of the estimates."""

    def off(key: str) -> dict[str, float]:
        errors = [abs(row[key] - 1) for row in report.results.values()]
        return {"median": statistics.median(errors), "worst": max(errors)}

    return {
        "points": len(report.results),
        "within 2 %": sum(abs(row["ratio"] - 1) <= 0.02 for row in report.results.values()),
        "estimated": off("ratio"),
        "scalar": off("scalar ratio"),
    }


# -- slice_steps

TARGET = "h200:8x2"
STEPS = ((GPT, 2, 8, 1), (GPT, 1, 4, 4), (LLAMA, 1, 16, 1), (LLAMA, 1, 4, 4))


def compiled_text(traced, target: Target) -> tuple[str, int]:
    """The optimized module of a step on absent GPUs, and its bytes."""
    chip = target.gpu
    assert chip is not None
    exported, donated = export_flat(traced, target.platform, target.compute_capability)
    step = jax.export.deserialize(bytearray(exported))
    mesh = deviceless_mesh(gpu.devices(gpu.described(target, chip)), step)
    divided = zip(step.in_avals, step.in_shardings_jax(mesh))
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in divided]
    options = gpu.COST_OPTIONS | options_of(target.platform, traced)
    lowered = jax.jit(step.call, donate_argnums=donated).lower(*args)
    made = lowered.compile(compiler_options=options)
    return made.as_text() or "", compiled_bytes(made)


def transfers(module: HloModule, name: str, runs: int = 1) -> Iterator[tuple[int, Instruction]]:
    """The collectives of a computation and of those that it calls, each with how often it runs."""
    for i in module.body(name):
        if is_collective(i):
            yield from () if i.opcode.endswith("-done") else ((runs, i),)
            continue
        for called in i.called:
            yield from transfers(module, called, runs * i.trips)


def by_kind(text: str) -> dict[str, dict[str, int]]:
    """By kind of the collectives: how often they run, and their bytes on a device."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"runs": 0, "bytes": 0})
    module = HloModule(text)
    for runs, i in transfers(module, module.entry):
        given, made = (sum(a.nbytes for a in arrays) for arrays in (i.operands, i.results))
        size = max(given, made - given if i.opcode.endswith("-start") else made)
        found[kind_of(i)]["runs"] += runs
        found[kind_of(i)]["bytes"] += runs * size
    return dict(found)


def full_size(name: str, data: int, fsdp: int, tensor: int) -> dict[str, Any]:
    """The compiled step of a config on `TARGET`."""
    target, config = Target.parse(TARGET), config_of(name, data, fsdp, tensor)
    _, traced, _ = traced_on(config, TARGET, Assignment.nothing())
    text, size = compiled_text(traced, target)
    chip = target.gpu
    assert chip is not None
    links = gpu.links(target, chip)
    thin = dataclasses.replace(links, network=links.network / 10)
    alone, seconds, slow = (
        hlo_costs(text, rates_of(chip), between).seconds for between in (None, links, thin)
    )
    assert seconds is not None
    tokens = config.train.batch * config.train.sequence
    return {
        "bytes": size,
        "collectives": by_kind(text),
        "seconds": seconds,
        "tokens a second": tokens / seconds,
        "alone": alone,
        "thin": slow,
    }


# -- slice_seconds

COUNTS = {1: "h200", 8: "h200:8", 64: "h200:8x8", 256: "h200:8x32"}


def cpu_seconds(who: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, or of child processes that end meanwhile."""
    used = lambda: sum(resource.getrusage(who)[:2])
    before = used()
    made = work()
    return used() - before, made


def of_devices(devices: int) -> dict[str, Any]:
    """CPU seconds of tracing and estimating a step, and of XLA's compile of the step."""
    target = COUNTS[devices]
    config = config_of(LLAMA, 1, devices, 1, *SMALL, *MORE[LLAMA])
    mine, theirs = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN

    def estimate():
        jax.clear_caches()
        stage, traced, args = traced_on(config, target, KEPT)
        shards = shards_of(traced, args, devices)
        with on(target) as backend:
            backend.temporary_bytes(traced, shards, args=args)
        return stage, traced

    def compile_step():
        start = time.perf_counter()
        with own_cache(), on(target) as backend:
            backend.compile_buffers(*made).result()
        return time.perf_counter() - start

    ours, made = min((cpu_seconds(mine, estimate) for _ in range(3)), key=lambda one: one[0])
    compiling, wall = cpu_seconds(theirs, compile_step)
    return {"estimate": ours, "compile": compiling, "compile by the clock": wall}


def of_growth(report: Report) -> dict[str, float]:
    """The seconds on 256 devices over the seconds on one."""
    one, most = report["1"], report["256"]
    return {key: most[key] / one[key] for key in ("estimate", "compile")}


RESULTS = {
    "slice_seconds": Benchmark(COUNTS, row=of_devices, summary=of_growth),
    "slice_steps": Benchmark(STEPS, row=full_size),
    "slice_bytes": Benchmark(POINTS, row=point, summary=of_bytes),
}

if __name__ == "__main__":
    measure("slices", RESULTS)
