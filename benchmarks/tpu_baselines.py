"""What a JAX user would pick today against plans of the same bytes, for TPUs that are not there.

    python -m benchmarks.tpu_baselines

Each baseline of `benchmarks/shared/baselines.py` is compiled until its buffers are assigned (whole,
where a plan does not win): its bytes, and its time by a roofline of what the compiler fuses, with
the planner's price of copies to host memory that the layers' work does not hide. Then a plan at its
bytes, reckoned in the same way. No step ran. A plan wins, or loses, where the times differ by more
than 1 % of the baseline's.
"""

import collections

import jax

from benchmarks.shared.assignments import show
from benchmarks.shared.baselines import Baseline, baselines, compiler_of
from benchmarks.shared.case import Case, case_on
from benchmarks.shared.results import Report
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.solve.cost import evaluate

CASES = tuple(f"{name} {target}" for name in ("gpt_117m", "gpt_345m") for target in ("v5e", "v6e"))
DRAW = 0.01  # of the baseline's time


def row(case: Case, step: CompiledStep, actions) -> dict:
    assert step.compiled.xla_seconds is not None
    exposed = evaluate(case.profile, actions).host_seconds
    return {
        "bytes": step.compiled.total_bytes,
        "host_bytes": step.compiled.host_bytes,
        "roofline_seconds": step.compiled.xla_seconds + exposed,
        "exposed_copies_seconds": exposed,
        "actions": show(actions),
    }


def of_baseline(case: Case, baseline: Baseline, whole: bool = False) -> dict:
    compiler = compiler_of(case, baseline)
    (step,) = compiler.compile(baseline.actions)
    return row(case, compiler.compile_fully(step) if whole else step, baseline.actions)


def of_plan(case: Case, at_bytes: int) -> dict:
    plan, told = case.attempt(case.budget_for(at_bytes))
    if plan is not None:
        told |= row(case, case.compile(plan.actions)[0], plan.actions)
    return told | {"at_bytes": at_bytes}


def compare(report: Report, key: str) -> None:
    config, target = key.split()
    with case_on(target, config) as case:
        for baseline in baselines(case.profile):
            if baseline.lossy:
                continue
            name, beside = f"{key} baseline {baseline.name}", f"{key} plan {baseline.name}"
            at = report.once(name, of_baseline, case, baseline)["bytes"]
            if report.has(beside) or at > case.target.usable_bytes:
                continue
            plan = of_plan(case, at)
            if outcome(plan, report[name]) != "win":
                # Compiled whole, as a plan is, it may take a little more than its buffers.
                report.add(name, of_baseline(case, baseline, whole=True))
                plan = of_plan(case, report[name]["bytes"])
            report.add(beside, plan)


def outcome(plan: dict, base: dict) -> str:
    if not plan["found"]:
        return "none found"
    less = 1 - plan["roofline_seconds"] / base["roofline_seconds"]
    return "win" if less > DRAW else "loss" if less < -DRAW else "draw"


def of_case(report: Report, key: str) -> dict:
    rows = {}
    for against, plan in report.under(f"{key} plan ").items():
        base = report[f"{key} baseline {against}"]
        ratio = plan["roofline_seconds"] / base["roofline_seconds"] if plan["found"] else None
        rows[against] = {"outcome": outcome(plan, base), "time against the baseline's": ratio}
    counts = collections.Counter({"win": 0, "draw": 0, "loss": 0, "none found": 0})
    counts.update(r["outcome"] for r in rows.values())
    return {"counts": counts, "rows": rows}


def main() -> None:
    # Of dropout by threefry, JAX's default, XLA:TPU writes dozens of arrays as large as the mask.
    jax.config.update("jax_default_prng_impl", "rbg")
    Report("tpu_baselines").of_each(CASES, compare, of_case)


if __name__ == "__main__":
    main()
