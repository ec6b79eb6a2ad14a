"""Plans for TPUs that are not there, over the range of budgets: whether one is found, what it
takes, how well that was predicted.

    python -m benchmarks.tpu_budgets

The range is from the least that compiled (what the planner says of a budget that is too small) to
everything kept; the budgets divide it evenly, its ends left out, and those beyond the device's
memory are the device's memory instead. Random bits are rbg's, as is common on TPUs. Times are the
planner's: a roofline of what the compiler fuses. No step ran.
"""

from collections.abc import Callable

import jax

import jaxmem
from benchmarks.shared import sharded_llama
from benchmarks.shared.case import Step, between, of_rows, on
from benchmarks.shared.results import Report
from benchmarks.shared.steps import of_config, shapes, step_of
from jaxmem._trace.step import trace
from tests.shared.foreign import libraries
from tests.shared.foreign.size import Size

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


def ends(step: Step) -> dict:
    """Bytes of the least that compiled, and of everything kept."""
    kept = step.backend.assign(*trace(step.build, None, step.args)).result()
    return {
        "least": step.least(kept.argument_bytes + MiB),
        "everything": kept.total_bytes,
        "everything_seconds": kept.xla_seconds,
    }


def run(report: Report, key: str) -> None:
    name, target = key.split()
    if all(report.has(f"{key} {i}/{BETWEEN + 1}") for i in range(1, BETWEEN + 1)):
        return
    with on(target) as backend:
        step = Step(*step_for(name, backend.target.devices), backend)
        e, most = report.once(f"{key} ends", ends, step), backend.target.usable_bytes
        for label, budget in between(e["least"], e["everything"], BETWEEN).items():
            report.once(f"{key} {label}", step.row, min(budget, most))


def of_case(report: Report, key: str) -> dict:
    return of_rows(r for k, r in report.under(f"{key} ").items() if k != "ends")


def main() -> None:
    # Of dropout by threefry, JAX's default, XLA:TPU writes dozens of arrays as large as the mask.
    jax.config.update("jax_default_prng_impl", "rbg")
    Report("tpu_budgets").of_each(CASES, run, of_case)


if __name__ == "__main__":
    main()
