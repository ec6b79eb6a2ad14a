"""What a JAX user would pick today against plans of the same bytes, for TPUs that are not there.

    python -m benchmarks.tpu_baselines

Each baseline of `benchmarks/shared/baselines.py` is compiled until its buffers are assigned (whole,
where a plan does not win): its bytes, and its time by a roofline of what the compiler fuses, with
the planner's price of copies to host memory that the layers' work does not hide. Then a plan at its
bytes, reckoned in the same way. No step ran. A plan wins, or loses, where the times differ by more
than 1 % of the baseline's.
"""

import jax

import jaxmem
from benchmarks.shared.baselines import Baseline, baselines
from benchmarks.shared.case import Case, show
from benchmarks.shared.results import Report
from experiments.models.loops import scanned
from experiments.steps.step import step_over
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target

# Of dropout by threefry, JAX's default, XLA:TPU writes dozens of arrays as large as the mask.
jax.config.update("jax_default_prng_impl", "rbg")

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
    build = case.build
    if not baseline.exact:
        build = lambda _: step_over(case.config, scanned(baseline.policy))
    compiler = StepCompiler(build, case.args, case.backend)
    (step,) = compiler.compile(baseline.actions)
    return row(case, compiler.compile_fully(step) if whole else step, baseline.actions)


def of_plan(case: Case, at_bytes: int) -> dict:
    budget = int(at_bytes / (1 - case.backend.margin)) + 1
    try:
        plan = jaxmem.plan(case.build, *case.args, budget=budget, target=case.target)
    except jaxmem.errors.BudgetError as error:
        return {"at_bytes": at_bytes, "found": False, "least_bytes": error.least_bytes}
    (step,) = case.compile(plan.actions)
    return row(case, step, plan.actions) | {
        "at_bytes": at_bytes,
        "found": True,
        "compiled_bytes": plan.compiled_bytes,
        "compiles": plan.compiles,
    }


def compare(report: Report, key: str) -> None:
    config, target = key.split()
    usable = Target.parse(target).usable_bytes
    with backend_for(Target.parse(target)) as backend:
        case = Case(config, backend)
        for baseline in baselines(case.profile):
            if baseline.lossy:
                continue
            name = f"{key} baseline {baseline.name}"
            if not report.has(name):
                report.add(name, of_baseline(case, baseline))
            beside, at = f"{key} plan {baseline.name}", report[name]["bytes"]
            if not report.has(beside) and at <= usable:
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


def summary(report: Report) -> dict:
    told = {}
    for key in CASES:
        rows, counts = {}, {"win": 0, "draw": 0, "loss": 0, "none found": 0}
        for name, plan in report.results.items():
            if not name.startswith(f"{key} plan "):
                continue
            against = name.removeprefix(f"{key} plan ")
            base = report[f"{key} baseline {against}"]
            which = outcome(plan, base)
            counts[which] += 1
            ratio = plan["roofline_seconds"] / base["roofline_seconds"] if plan["found"] else None
            rows[against] = {"outcome": which, "time against the baseline's": ratio}
        if rows:
            told[key] = {"counts": counts, "rows": rows}
    return told


def main() -> None:
    Report("tpu_baselines").for_each(CASES, compare, summary)


if __name__ == "__main__":
    main()
