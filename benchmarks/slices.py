"""Steps on meshes of 8 to 256 GPUs and TPUs that the machine does not have: bytes of a device,
predicted without a compile and compiled, and the transfers between devices.

    python -m benchmarks.slices [RESULT ...]

The models are the configs `gpt_20b_h100x16` and `llama_13b_v5e_16x16` with 8 layers of a width of
2048, over a mesh with the axes data, fsdp and tensor. Each part of the batch has two sequences of
1024 tokens. With tensor parallelism, the activations between layers are divided along the sequence.

`slice_bytes`: 20 points of a model, a mesh and a target. The layers keep the result of attention
and the residual after it, and recompute all else. `estimated` are the bytes of
`jaxmem.plans.estimate`, without a compile; `scalar` is the same estimate if every value is divided
by the devices that divide the batch, as it was before; `compiled` are XLA's.

`slice_seconds`: CPU seconds for one model on 1 to 256 devices, fully sharded with two sequences
each: of tracing the step and estimating its bytes, the least of three; of a process that compiles
it; and of a whole plan with its processes, from an empty cache, within 1.25 of the estimated bytes.
The machine does other work, so that the clock says little.

`slice_steps`: the two configs at their full size on `h200:8x2`, and the Llama on `v5e:16x16`, over
two meshes each, with every layer recomputed: bytes of a device; collectives of one step by kind,
how often they run, and the bytes of the larger of their operands and results; predicted seconds and
tokens a second. `alone` are the predicted seconds without the transfers between devices, `thin`
with a tenth of the network between hosts. A slice of TPUs has no such network.
"""

import dataclasses
import functools
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

import jaxmem
from benchmarks.shared.case import on
from benchmarks.shared.results import Benchmark, Report, known, measure
from benchmarks.shared.searches import own_cache
from experiments.command.load import load
from experiments.running.planning import over_devices
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import KEEP
from jaxmem._target.compile.options import options_of
from jaxmem._target.compiled.compiled import compiled_bytes
from jaxmem._target.deviceless import gpu, tpu
from jaxmem._target.deviceless.process import child_environment
from jaxmem._target.deviceless.worker import deviceless_mesh
from jaxmem._target.devices.rates import rates_of
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.collectives import is_collective, kind_of
from jaxmem._target.hlo.costs import hlo_costs
from jaxmem._target.hlo.roofline import tpu_costs
from jaxmem._target.hlo.text import HloModule
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

GPUS, TPUS = "h200:8x2", "v5e:16x16"
STEPS = (
    (GPT, 2, 8, 1, GPUS),
    (GPT, 1, 4, 4, GPUS),
    (LLAMA, 1, 16, 1, GPUS),
    (LLAMA, 1, 4, 4, GPUS),
    (LLAMA, 1, 64, 4, TPUS),
    (LLAMA, 1, 256, 1, TPUS),
)
# Of a collective that a TPU runs beside other kernels, the names of all fusions but the first.
GOES_ON = "async_collective", "async-collective-done"


def compiled_text(traced, target: Target) -> tuple[str, int]:
    """The optimized module of a step on absent devices, and its bytes."""
    exported, donated = export_flat(traced, target.platform, target.compute_capability)
    step = jax.export.deserialize(bytearray(exported))
    options = options_of(target.platform, traced)
    if target.topology is None:
        devices = gpu.devices(gpu.described(target, known(target.gpu)))
        options |= gpu.COST_OPTIONS
    else:
        os.environ |= child_environment(os.environ)  # libtpu reads it when it is loaded
        devices = tpu.devices(tpu.described(target.topology))
    mesh = deviceless_mesh(devices, step)
    divided = zip(step.in_avals, step.in_shardings_jax(mesh))
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in divided]
    lowered = jax.jit(step.call, donate_argnums=donated).lower(*args)
    made = lowered.compile(compiler_options=options)
    return made.as_text() or "", compiled_bytes(made)


def transfers(module: HloModule, name: str, runs: int = 1) -> Iterator[tuple[int, str, int]]:
    """The collectives of a computation and of those that it calls: how often each runs, its kind,
    and the bytes of the larger of its operands and results.
    """
    for i in module.body(name):
        if is_collective(i):
            given, made = (sum(a.nbytes for a in arrays) for arrays in (i.operands, i.results))
            size = max(given, made - given if i.opcode.endswith("-start") else made)
            yield from () if i.opcode.endswith("-done") else ((runs, kind_of(i), size),)
            continue
        inside = i.opcode == "fusion"
        if inside and any(word in name for name in (i.name, *i.runs) for word in GOES_ON):
            continue
        turns = module.turns(i) if i.opcode == "while" else 1
        for called in i.called:
            for count, kind, size in transfers(module, called, runs * turns):
                # A TPU's fusion slices the result of an all-reduce, and so only scatters it.
                yield count, "reduce-scatter" if inside and kind == "all-reduce" else kind, size


def by_kind(text: str) -> dict[str, dict[str, int]]:
    """By kind of the collectives: how often they run, and their bytes on a device."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"runs": 0, "bytes": 0})
    module = HloModule(text)
    for runs, kind, size in transfers(module, module.entry):
        found[kind]["runs"] += runs
        found[kind]["bytes"] += runs * size
    return dict(found)


def predicted(text: str, target: Target) -> dict[str, float | None]:
    """The predicted seconds of a module: with all links, without them, and with a thin network."""
    if target.topology is not None:
        rates = tpu.rates(target.topology)
        apart = dataclasses.replace(rates, ring=0.0, neighbours=0.0)
        seconds, alone = (tpu_costs(text, by).seconds for by in (rates, apart))
        return {"seconds": seconds, "alone": alone, "thin": None}
    chip = known(target.gpu)
    links = gpu.links(target, chip)
    between = links, None, dataclasses.replace(links, network=links.network / 10)
    found = (hlo_costs(text, rates_of(chip), by).seconds for by in between)
    return dict(zip(("seconds", "alone", "thin"), found))


def full_size(name: str, data: int, fsdp: int, tensor: int, target: str) -> dict[str, Any]:
    """The compiled step of a config."""
    config, on_target = config_of(name, data, fsdp, tensor), Target.parse(target)
    _, traced, _ = traced_on(config, target, Assignment.nothing())
    text, size = compiled_text(traced, on_target)
    found = predicted(text, on_target)
    tokens = config.train.batch * config.train.sequence
    rate = {"tokens a second": tokens / known(found["seconds"])}
    return {"bytes": size, "collectives": by_kind(text)} | found | rate


# -- slice_seconds

ROOM = 1.25
COUNTS = {1: "h200", 8: "h200:8", 64: "h200:8x8", 256: "h200:8x32"}


def cpu_seconds(who: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, or of child processes that end meanwhile."""
    used = lambda: sum(resource.getrusage(who)[:2])
    before = used()
    made = work()
    return used() - before, made


def of_devices(devices: int) -> dict[str, Any]:
    """CPU seconds of tracing and estimating a step, of XLA's compile of the step, and of a plan."""
    target = COUNTS[devices]
    config = config_of(LLAMA, 1, devices, 1, *SMALL, *MORE[LLAMA])
    mine, theirs = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN

    def estimate():
        jax.clear_caches()
        stage, traced, args = traced_on(config, target, KEPT)
        shards = shards_of(traced, args, devices)
        with on(target) as backend:
            temporary = backend.temporary_bytes(traced, shards, args=args)
        return stage, traced, argument_bytes(traced, args, devices) + temporary

    def compile_step():
        start = time.perf_counter()
        with own_cache(), on(target) as backend:
            backend.compile_buffers(stage, traced).result()
        return time.perf_counter() - start

    def plan():
        jax.clear_caches()
        with own_cache(), over_devices(config, target):
            build = functools.partial(make_step, config)
            budget = int(ROOM * estimated)
            return jaxmem.plan(build, *abstract(config), target=target, budget=budget).compiles

    tries = (cpu_seconds(mine, estimate) for _ in range(3))
    ours, (stage, traced, estimated) = min(tries, key=lambda one: one[0])
    compiling, wall = cpu_seconds(theirs, compile_step)
    own, (children, compiles) = cpu_seconds(mine, lambda: cpu_seconds(theirs, plan))
    times = {"estimate": ours, "compile": compiling, "compile by the clock": wall}
    return times | {"plan": own + children, "compiles of the plan": compiles}


def of_growth(report: Report) -> dict[str, float]:
    """The seconds on 256 devices over the seconds on one."""
    one, most = report["1"], report["256"]
    return {key: most[key] / one[key] for key in ("estimate", "compile", "plan")}


RESULTS = {
    "slice_seconds": Benchmark(COUNTS, row=of_devices, summary=of_growth),
    "slice_steps": Benchmark(STEPS, row=full_size),
    "slice_bytes": Benchmark(POINTS, row=point, summary=of_bytes),
}

if __name__ == "__main__":
    measure("slices", RESULTS)
