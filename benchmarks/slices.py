"""Plans for meshes of 8 to 256 devices that the machine does not have.

    python -m benchmarks.slices [RESULT ...]

The models are the configs `gpt_20b_h100x16` and `llama_13b_v5e_16x16` with fewer and narrower
layers, over a mesh with the axes data, fsdp and tensor. Each device has a sequence or more.

`slice_bytes`: a plan for each of 20 points, whose budget is halfway between the arguments and the
step with everything kept. `predicted` is the plan's prediction before the plan's step was compiled:
for a GPU the liveness estimate, corrected by the errors of the search's other compiles; for a TPU
the buffers that libtpu assigned before it generated code. `estimated` is what
`jaxmem.plans.estimate` says of the plan's step, without any compile for a GPU.
"""

import statistics
from typing import Any

import jaxmem
from benchmarks.shared.case import Case, on, random_bits_for
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.searches import replacing
from experiments.command.load import load
from experiments.running.planning import over_devices
from jaxmem._planner.search import whole_steps
from jaxmem._target.compile.backend import Deviceless

GPT, LLAMA = "gpt_20b_h100x16", "llama_13b_v5e_16x16"
SMALL = "model.layers=8", "model.width=2048", "model.heads=16", "model.vocab=16384"
# By config: what makes it small.
SMALLER = {
    GPT: SMALL,
    LLAMA: (*SMALL, "model.hidden=5632", "train.sequence=1024"),
}
# (config, data, fsdp, tensor, target)
POINTS = (
    (GPT, 8, 1, 1, "h200:8"),
    (GPT, 1, 8, 1, "a100-80gb:8"),
    (LLAMA, 1, 1, 8, "h200:8"),
    (GPT, 2, 8, 1, "h100-80gb:8x2"),
    (LLAMA, 1, 4, 4, "h200:8x2"),
    (LLAMA, 2, 4, 4, "a100-80gb:8x4"),
    (GPT, 4, 8, 2, "h200:8x8"),
    (LLAMA, 1, 64, 1, "h100-80gb:8x8"),
    (LLAMA, 1, 16, 8, "h200:8x16"),
    (GPT, 4, 8, 8, "h100-80gb:8x32"),
    (GPT, 1, 8, 1, "v6e:2x4"),
    (LLAMA, 1, 2, 4, "v5e:2x4"),
    (GPT, 2, 8, 1, "v5p:2x2x4"),
    (LLAMA, 1, 16, 1, "v6e:4x4"),
    (GPT, 1, 8, 4, "v5e:4x8"),
    (LLAMA, 4, 16, 1, "v5p:4x4x4"),
    (GPT, 1, 16, 4, "v6e:8x8"),
    (LLAMA, 2, 16, 4, "v5e:8x16"),
    (LLAMA, 1, 64, 4, "v5e:16x16"),
    (GPT, 1, 256, 1, "v6e:16x16"),
)
DEVICE = "keep", "recompute"
# Pieces of layers are priced by the device's rates instead of by compiles.
BY_RATES = Deviceless, "times", lambda self, jobs: None
# Changes of a plan that are compiled for a TPU's buffers: here bytes count, and not seconds.
FEW = whole_steps, "MOST_BUFFER_COMPILES", 2
SHARE = 0.5  # of the bytes of everything kept beyond the arguments


def config_of(name: str, data: int, fsdp: int, tensor: int, *more: str):
    mesh = f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}"
    sequence = "mesh.sequence=false" if tensor == 1 else "mesh.sequence=true"
    batch = f"train.batch={2 * data * fsdp}"
    return load(name, [*SMALLER[name], *mesh, sequence, batch, *more])


def planned(name: str, data: int, fsdp: int, tensor: int, target: str) -> dict[str, Any]:
    """The bytes of one point: predicted, estimated and compiled."""
    config = config_of(name, data, fsdp, tensor, f'plan.target="{target}"')
    random_bits_for(target)
    with on(target) as backend, over_devices(config, target):
        case = Case(config, backend)
        (kept,) = case.compile_buffers(None)
        arguments = kept.compiled.argument_bytes
        budget = arguments + SHARE * (kept.total - arguments)
        with replacing(BY_RATES, FEW):
            plan = case.plan(case.budget_for(int(budget)), actions=DEVICE)
            estimated = jaxmem.plans.estimate(case.build, plan, *case.args, target=target)
    return {
        "devices": case.target.devices,
        "predicted": plan.predicted_bytes,
        "estimated": estimated.bytes,
        "compiled": plan.compiled_bytes,
        "arguments": arguments,
        "everything": kept.total,
        "everything estimated": estimated.baseline_bytes,
        "compiles": plan.compiles,
        "ratio": plan.predicted_bytes / plan.compiled_bytes,
        "ratio of the estimate": estimated.bytes / plan.compiled_bytes,
        "actions": {label: sorted(map(str, tags)) for label, tags in plan.actions.items()},
    }


def of_bytes(report: Report) -> dict[str, Any]:
    """The errors of all points, and of the GPUs' points alone."""

    def off(key: str, gpus: bool) -> dict[str, float]:
        rows = report.results.items()
        errors = [abs(row[key] - 1) for name, row in rows if not gpus or is_gpu(name)]
        return {"median": statistics.median(errors), "worst": max(errors)}

    return {
        "points": len(report.results),
        "predicted": off("ratio", False),
        "predicted, GPUs": off("ratio", True),
        "estimated, GPUs": off("ratio of the estimate", True),
    }


def is_gpu(point: str) -> bool:
    return any(gpu in point for gpu in ("h200", "h100", "a100"))


RESULTS = {
    "slice_bytes": Benchmark(POINTS, row=planned, summary=of_bytes),
}

if __name__ == "__main__":
    measure("slices", RESULTS)
