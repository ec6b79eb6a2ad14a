"""Plans for TPUs that are not there, over the range of budgets: whether one is found, what it
takes, how well that was predicted.

    python -m benchmarks.tpu_budgets

The range is from the least that compiled (what the planner says of a budget that is too small) to
everything kept; the budgets divide it evenly, its ends left out, and those beyond the device's
memory are the device's memory instead. Random bits are rbg's, as is common on TPUs. Times are the
planner's: a roofline of what the compiler fuses. No step ran.
"""

import statistics
import time
from collections.abc import Callable

import jax

import jaxmem
from benchmarks.shared import sharded_llama
from benchmarks.shared.results import Report
from benchmarks.shared.steps import of_config, shapes, step_of
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from tests.shared.foreign import libraries
from tests.shared.foreign.size import Size

# Of dropout by threefry, JAX's default, XLA:TPU writes dozens of arrays as large as the mask.
jax.config.update("jax_default_prng_impl", "rbg")

MiB = 2**20
BETWEEN = 8
VIT = Size(width=768, heads=12, layers=12, batch=64, sequence=224, vocab=1000)
CASES = (
    *(f"{name} {target}" for name in ("gpt_117m", "gpt_345m") for target in ("v5e", "v5p", "v6e")),
    *(f"llama_1b {target}" for target in ("v5e:4x4", "v5p:2x2x4", "v6e:4x4")),
    *(f"vit {target}" for target in ("v5e", "v5p", "v6e")),
)


def step_for(name: str, devices: int) -> tuple[Callable, tuple]:
    """(`build`, its arguments' shapes)."""
    if name == "llama_1b":
        return sharded_llama.build_and_arguments(devices)
    if name == "vit":
        loss, params, rest = libraries.vit(VIT)
        return jaxmem.auto(step_of(loss)), shapes((params, *rest))
    return of_config(name)


def ends(build: Callable, args: tuple, target: str) -> dict:
    """Bytes of the least that compiled, and of everything kept."""
    with backend_for(Target.parse(target)) as backend:
        kept = backend.assign(*trace(build, None, args)).result()
        # A little more than the arguments: less is refused before anything is compiled.
        little = int((kept.argument_bytes + MiB) / (1 - backend.margin))
    try:
        jaxmem.plan(build, *args, budget=little, target=target)
    except jaxmem.errors.BudgetError as error:
        return {
            "least": error.least_bytes,
            "everything": kept.total_bytes,
            "everything_seconds": kept.xla_seconds,
        }
    raise AssertionError("the arguments' bytes were enough for the step")


def at(build: Callable, args: tuple, target: str, budget: int) -> dict:
    start = time.perf_counter()
    try:
        plan = jaxmem.plan(build, *args, budget=budget, target=target)
    except jaxmem.errors.BudgetError as error:
        return {"budget": budget, "found": False, "least": error.least_bytes}
    return {
        "budget": budget,
        "found": True,
        "compiles": plan.compiles,
        "compiled_bytes": plan.compiled_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "prediction_error": abs(plan.predicted_bytes / plan.compiled_bytes - 1),
        "share_of_budget": plan.compiled_bytes / budget,
        "host_bytes": plan.host_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "baseline_seconds": plan.baseline_seconds,
        "keeps_everything": plan.keeps_everything,
        "actions": sorted({r.choice.action.value for r in plan.rows}),
        "wall_seconds": time.perf_counter() - start,
    }


def run(report: Report, key: str) -> None:
    name, target = key.split()
    wanted = [f"{key} {i}/{BETWEEN + 1}" for i in range(1, BETWEEN + 1)]
    if all(map(report.has, wanted)):
        return
    step = step_for(name, Target.parse(target).devices)
    if not report.has(f"{key} ends"):
        report.add(f"{key} ends", ends(*step, target))
    e, most = report[f"{key} ends"], Target.parse(target).usable_bytes
    for i, one in enumerate(wanted, 1):
        if not report.has(one):
            budget = e["least"] + (e["everything"] - e["least"]) * i // (BETWEEN + 1)
            report.add(one, at(*step, target, min(budget, most)))


def summary(report: Report) -> dict:
    told = {}
    for key in CASES:
        rows = [r for k, r in report.results.items() if k.startswith(f"{key} ") and "budget" in r]
        found = [r for r in rows if r["found"]]
        if not found:
            continue
        told[key] = {
            "budgets": len(rows),
            "found": len(found),
            "within": sum(r["compiled_bytes"] <= r["budget"] for r in found),
            "median prediction error": statistics.median(r["prediction_error"] for r in found),
            "worst prediction error": max(r["prediction_error"] for r in found),
            "most compiles": max(r["compiles"] for r in found),
            "median share of budget": statistics.median(r["share_of_budget"] for r in found),
            "longest seconds": max(r["wall_seconds"] for r in found),
        }
    return told


def main() -> None:
    Report("tpu_budgets").for_each(CASES, run, summary)


if __name__ == "__main__":
    main()
