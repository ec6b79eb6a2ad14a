"""Plans made without a GPU, and the steps that the plans and policies give on that GPU.

    python -m benchmarks.gpu gpu_plans gpu_bytes   (a machine without a GPU)
    python -m benchmarks.gpu gpu_117m gpu_345m     (on an H200; reads the plans)

`gpu_plans`: for both models, compiled for an H200 that the machine does not have: the bytes
and the estimated seconds of each policy, and plans with several sets of actions, with their files.
A budget is a share of the way from full recomputation to everything kept.

`gpu_117m` and `gpu_345m`: the policies and plans on the GPU. Bytes: of the compile without the GPU,
of the compile on the GPU, and the device's own count of its peak. Steps run for the first time in
the order of their bytes, so a peak is a step's own if it is above the peak before it; otherwise it
is null. Seconds: the median of three runs in each round, in a random order. "apart" is predicted /
measured - 1. A profile of one run has the kernels of some steps.

`gpu_bytes`: the steps of the result `gpu_117m`, compiled again without the GPU, beside the device's
peak: with Triton's kernels for matrix products, which XLA takes if it tunes nothing, and with the
library's (cuBLAS), which an H200's tuning took for many. A step whose program has changed since
that run is left out: its bytes with Triton's kernels are not those that the run recorded.
"""

import concurrent.futures
import pathlib
import statistics
import tempfile
from typing import Any

import jax

import jaxmem
from benchmarks.policies import of_baseline
from benchmarks.shared.assignments import baselines
from benchmarks.shared.case import case_on
from benchmarks.shared.devices import compiled
from benchmarks.shared.results import RESULTS as FOLDER
from benchmarks.shared.results import Benchmark, Report, measure, say, timed
from experiments.command.load import load
from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.gpu_check.steps import Race
from experiments.models.loops import scanned
from experiments.running.policies import candidates
from experiments.steps.step import abstract, make_step, step_over
from jaxmem._core.files import read_json
from jaxmem._result.plan.file import read
from jaxmem.plans import ALL, LOSSLESS, Action, Assignment, Choice, compiled_bytes, compiler_options

GPU, CAPABILITY, ROUNDS = "h200", 90, 5
POLICIES = (
    "keep_everything", "nothing_saveable", "dots_with_no_batch_dims_saveable", "save_qkv_proj",
    "minimal_with_context", "keep_tags", "minimal_offloaded",
)  # fmt: skip
ON_DEVICE = tuple(a for a in Action if not a.offloads)
# The set of actions and the share of the way from full recomputation to everything kept.
PLANS = {
    "all 0.02": (ALL, 0.02),
    "all 0.2": (ALL, 0.2),
    "all 0.5": (ALL, 0.5),
    "device 0.1": (ON_DEVICE, 0.1),
    "lossless 0.1": (LOSSLESS, 0.1),
    "lossless 0.4": (LOSSLESS, 0.4),
    "recompute 0.2": ((Action.KEEP, Action.RECOMPUTE), 0.2),
}


def plans(report: Report, model: str) -> None:
    with case_on(GPU, model) as case:
        for baseline in baselines(case.profile):
            if baseline.name in POLICIES:
                report.once(f"{model} policy {baseline.name}", of_baseline, case, baseline)
        low, high = (
            report[f"{model} policy {name}"]["bytes"]
            for name in ("nothing_saveable", "keep_everything")
        )
        for name, (actions, share) in PLANS.items():
            budget = int(low + share * (high - low))
            report.once(f"{model} plan {name}", planned, case, budget, actions)


def planned(case, budget: int, actions) -> dict:
    (plan, row), seconds = timed(case.attempt, budget, actions=actions)
    if plan is None:
        return row
    row |= {"planning_seconds": seconds, "baseline_seconds": plan.baseline_seconds}
    return row | {"plan": plan.to_json()}


# The plans that the H200 ran, which are not the plans of today's prices: the tags that they save.
RUN = {
    "all 0.02": {
        "resid_in": "keep", "qkv": "offload", "attn_mask": "compress_offload bit_mask()",
        "attn": "offload", "attn_out_mask": "compress_offload bit_mask()", "mid": "keep",
        "mlp_out_mask": "compress_offload bit_mask()",
    },
    "all 0.2": {
        "resid_in": "offload", "probs": "keep", "attn_mask": "compress bit_mask()",
        "attn": "keep", "attn_out_mask": "compress_offload bit_mask()", "mid": "keep",
        "up": "offload", "mlp_out_mask": "compress bit_mask()",
    },
    "all 0.5": {
        "resid_in": "keep", "qkv": "keep", "probs": "keep", "attn_mask": "compress bit_mask()",
        "attn": "keep", "attn_out_mask": "compress bit_mask()", "mid": "keep", "up": "keep",
        "mlp_out_mask": "compress bit_mask()",
    },
    "device 0.1": {
        "resid_in": "keep", "qkv": "keep",
        "probs": "compress grouped_asymmetric(group=64,scale=bfloat16)",
        "attn_mask": "compress bit_mask()", "attn": "keep",
        "attn_out_mask": "compress bit_mask()", "mid": "keep",
        "mlp_out_mask": "compress bit_mask()",
    },
    "lossless 0.1": {
        "resid_in": "keep", "qkv": "keep", "attn": "keep", "attn_out_mask": "keep", "mid": "keep",
        "up": "offload", "mlp_out_mask": "keep",
    },
    "lossless 0.4": {
        "qkv": "keep", "probs": "keep", "attn_mask": "keep", "attn": "offload",
        "attn_out_mask": "offload", "mid": "keep", "up": "keep", "mlp_out_mask": "offload",
    },
    "recompute 0.2": {
        "resid_in": "keep", "attn_mask": "keep", "attn": "keep", "attn_out_mask": "keep",
        "mid": "keep", "mlp_out_mask": "keep",
    },
}  # fmt: skip
KERNELS = {"triton": True, "library": False}  # by XLA's option `xla_gpu_enable_triton_gemm`


def beside_peak(report: Report) -> None:
    measured = read_json(FOLDER / "gpu_117m.json")["results"]
    config = load("gpt_117m", ())
    shapes = abstract(config)
    for key, row in measured.items():
        kind, _, name = key.partition(" ")
        if kind not in ("policy", "plan") or report.has(key):
            continue
        step = policy_step(config, name) if kind == "policy" else run_step(config, name)
        options = compiler_options(step, *shapes, target=GPU)
        traced = jax.jit(step, donate_argnums=0).trace(*shapes)
        found = {}
        for kernels, triton in KERNELS.items():
            given = options | {"xla_gpu_enable_triton_gemm": triton}
            found[kernels] = compiled(GPU, traced, CAPABILITY, given).total_bytes
        same = found["triton"] == row["absent_bytes"]
        report.add(key, found | {"peak_bytes": row["peak_bytes"], "same_program": same})


def run_step(config: Config, name: str):
    """The step of a plan that the H200 ran."""
    texts = {tag: text.partition(" ") for tag, text in RUN[name].items()}
    choices = {t: Choice(Action(action), codec or None) for t, (action, _, codec) in texts.items()}
    return make_step(config, Assignment({"block": choices}))


def of_peaks(report: Report) -> dict:
    """The most and the least of bytes / peak - 1, by the kernels of products."""
    rows = [row for row in report.results.values() if row["same_program"]]
    ways = {name: (name,) for name in KERNELS} | {"the greater": (*KERNELS,)}
    found: dict[str, Any] = {"steps": len(rows)}
    for name, kernels in ways.items():
        off = [max(row[k] for k in kernels) / row["peak_bytes"] - 1 for row in rows]
        found[name] = {"least": min(off), "most": max(off)}
    return found


# -- on the GPU

TRACED = ("policy keep_everything", "policy minimal_offloaded", "plan all 0.5", "plan device 0.1")
MOST = 60  # kernels that a result lists


def step_of(config: Config, name: str, row: dict):
    """The step of a row of `gpu_plans`, lowered for this device."""
    if "plan" in row:
        step = make_step(config, read(jaxmem.Plan, row["plan"], "gpu_plans.json"))
    else:
        step = policy_step(config, name)
    shapes = abstract(config)
    options = compiler_options(step, *shapes)
    return jax.jit(step, donate_argnums=0, compiler_options=options).lower(*shapes)


def policy_step(config: Config, name: str):
    remat = config.remat.model_copy(update={"policy": name})
    (candidate,) = candidates(config.model_copy(update={"remat": remat}))
    return step_over(config, scanned(candidate.policy, candidate.every))


def on_the_gpu(report: Report, model: str) -> None:
    config = load(model, ())
    without = read_json(FOLDER / "gpu_plans.json")["results"]
    rows = {
        key.removeprefix(f"{model} "): row
        for key, row in without.items()
        if key.startswith(model) and row.get("found", True)
    }
    lowered = {key: step_of(config, key.partition(" ")[2], row) for key, row in rows.items()}
    say(f"{model}: {len(lowered)} steps traced")
    steps: dict[str, Any] = {}
    # The first compile fills XLA's cache of kernel choices, which the others share.
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        first, *others = lowered
        found = {first: timed(lowered[first].compile)}
        futures = {key: pool.submit(timed, lowered[key].compile) for key in others}
        for key, future in futures.items():
            try:
                found[key] = future.result()
            except jax.errors.JaxRuntimeError as error:
                report.add(key, {"error": str(error)[:500]})
    for key, (step, seconds) in sorted(found.items(), key=lambda item: compiled_bytes(item[1][0])):
        steps[key] = step
        sizes = {"bytes": compiled_bytes(step), "compile_seconds": seconds}
        report.add(key, told_without_gpu(rows[key]) | sizes)
    race = Race(config, {key: lambda step=step: step for key, step in steps.items()})
    for key, (before, after) in race.peaks.items():
        row = report[key] | {"peak_before": before, "peak_after": after}
        report.add(key, row | {"peak_bytes": after if after and after > before else None})
    for key, error in race.failed.items():
        report.add(key, report[key] | {"error": error})
    for number in range(ROUNDS):
        report.add(f"round {number}", race.round(number))
    for key in (k for k in TRACED if k in race.steps):
        report.add(f"kernels of {key}", kernels(race, key))


def told_without_gpu(row: dict) -> dict:
    """What a row of `gpu_plans` says before any GPU runs the step."""
    if "plan" in row:
        seconds, nbytes = row["predicted_seconds"], row["compiled_bytes"]
    else:
        seconds, nbytes = row["xla_seconds"] + row["host_seconds"], row["bytes"]
    return {"predicted_seconds": seconds, "absent_bytes": nbytes, "budget": row.get("budget")}


def kernels(race: Race, key: str) -> dict:
    """The kernels and copies of one run of a step: how often each ran, and its seconds."""
    found: dict[str, list] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            race.run(key)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events:
                    one = found.setdefault(event.name, [0, 0.0])
                    one[0], one[1] = one[0] + 1, one[1] + event.duration_ns / 1e9
    longest = sorted(found.items(), key=lambda item: -item[1][1])
    return {"seconds": sum(s for _, s in found.values()), "longest": dict(longest[:MOST])}


def on_gpu(report: Report) -> dict:
    rounds = [*report.under("round ").values()]
    rows = {}
    for key, row in report.results.items():
        if not key.startswith(("policy ", "plan ")) or "error" in row:
            continue
        seconds, peak = quartiles([one[key] for one in rounds]), row.get("peak_bytes")
        rows[key] = {
            "bytes, compiled without the GPU": row["absent_bytes"],
            "bytes, compiled on the GPU": row["bytes"],
            "bytes, the device's peak": peak,
            "compiled without the GPU / peak - 1": peak and row["absent_bytes"] / peak - 1,
            "predicted_seconds": row["predicted_seconds"],
            "seconds": seconds,
            "apart": row["predicted_seconds"] / seconds["median"] - 1,
        }
    apart = [abs(row["apart"]) for row in rows.values()]
    off = [r["compiled without the GPU / peak - 1"] for r in rows.values()]
    return {
        "steps": rows,
        "against the best policy": against_policies(rows, report),
        "median |apart|": statistics.median(apart),
        "largest |compiled / peak - 1|": max((abs(o) for o in off if o is not None), default=None),
    }


def against_policies(rows: dict, report: Report) -> dict:
    """For each plan, the fastest policy that takes no more than the plan's budget."""
    found, size = {}, "bytes, compiled on the GPU"
    median = lambda key: rows[key]["seconds"]["median"]
    for key in (k for k in rows if k.startswith("plan ")):
        fits = [k for k in rows if k.startswith("policy ")]
        fits = [k for k in fits if rows[k][size] <= report[key]["budget"]]
        best = min(fits, key=median, default=None)
        found[key] = {"best policy": best, "ratio": best and median(key) / median(best)}
    return found


RESULTS = {
    "gpu_plans": Benchmark(("gpt_117m", "gpt_345m"), plans),
    "gpu_bytes": Benchmark(run=beside_peak, summary=of_peaks),
    "gpu_117m": Benchmark(("gpt_117m",), on_the_gpu, summary=on_gpu),
    "gpu_345m": Benchmark(("gpt_345m",), on_the_gpu, summary=on_gpu),
}


if __name__ == "__main__":
    measure("gpu", RESULTS)
