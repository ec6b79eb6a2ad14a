"""What a JAX user would pick today against plans of the same bytes, compiled for an H200 that is
not there.

    python -m benchmarks.baselines_h200

Each baseline of `benchmarks/shared/baselines.py` is compiled: its bytes by XLA's buffer assignment,
its time in the planner's cost model (seconds on top of an ideal step that neither writes nor
repeats anything), and XLA's own estimate of the step. Then a plan at its bytes, and one 8 % below
the least of them all. Both times are models: no step ran. XLA's estimate leaves out host copies and
whatever it does not price, so it says nothing of offload. Bytes are of a compile without estimates,
since asking for them changes the matrix kernels. A plan wins where its time is less by more than
0.5 % of the step.
"""

import jaxmem
from benchmarks.shared.baselines import Baseline, baselines
from benchmarks.shared.case import Case, show
from benchmarks.shared.results import Report
from experiments.models.loops import scanned
from experiments.steps.step import step_over
from jaxmem._core.actions import ALL, LOSSLESS
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.solve.cost import evaluate, everything
from jaxmem._target.compile.backend import DEVICELESS_MARGIN, backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.jaxpr import matmul_flops

CONFIGS, TARGET = ("gpt_117m", "gpt_345m"), "h200"
FIRST = (
    "nothing_saveable",
    "keep_tags",
    "minimal_with_context",
    "save_qkv_proj",
    "qkv_proj_offloaded",
)
BELOW = 0.92
DRAW = 0.005  # of a step


def products(case: Case, actions, kept_flops: float) -> float:
    cost = evaluate(case.profile, actions)
    return kept_flops + sum(b.runs * c.flops for b, c in zip(case.profile.blocks, cost.blocks))


def of_baseline(case: Case, baseline: Baseline, kept_flops: float) -> dict:
    if baseline.exact:
        build = case.build
    else:
        build = lambda _: step_over(case.config, scanned(baseline.policy))
    steps = StepCompiler(build, case.args, case.backend)
    compiled = steps.compile(baseline.actions)[0].compiled
    cost = evaluate(case.profile, baseline.actions)
    predicted = products(case, baseline.actions, kept_flops)
    return {
        "bytes": compiled.total_bytes,
        "host_bytes": compiled.host_bytes,
        "model_extra_seconds": cost.seconds,
        "model_is": "exact" if baseline.exact else "the nearest keep-set",
        "xla_seconds": compiled.xla_seconds,
        "flops_ratio": compiled.matmul_flops / predicted,
        "actions": show(baseline.actions),
    }


def of_plan(case: Case, at_bytes: int, lossless: bool, kept_flops: float) -> dict:
    """A plan of no more than `at_bytes` as compiled: the planner's margin for autotuning is added
    to the budget.
    """
    budget = int(at_bytes / (1 - DEVICELESS_MARGIN)) + 1
    try:
        plan = jaxmem.plan(
            case.build,
            *case.args,
            budget=budget,
            target=case.target,
            actions=LOSSLESS if lossless else ALL,
        )
    except jaxmem.errors.BudgetError as error:
        return {"at_bytes": at_bytes, "found": False, "least_bytes": error.least_bytes}
    compiled = case.compile(plan.actions)[0].compiled
    return {
        "at_bytes": at_bytes,
        "found": True,
        "bytes": plan.compiled_bytes,
        "host_bytes": plan.host_bytes,
        "compiles": plan.compiles,
        "model_extra_seconds": evaluate(case.profile, plan.actions).seconds,
        "xla_seconds": compiled.xla_seconds,
        "flops_ratio": compiled.matmul_flops / products(case, plan.actions, kept_flops),
        "actions": show(plan.actions),
    }


def compare(report: Report, config: str) -> None:
    with backend_for(Target.parse(TARGET)) as backend:
        case = Case(config, backend)
        kept_flops = sum(matmul_flops(e)[0] for e in case.trace(None).jaxpr.jaxpr.eqns)
        everything_seconds = {"everything_extra_seconds": everything(case.profile).seconds}
        for baseline in sorted(baselines(case.profile), key=lambda b: b.name not in FIRST):
            if not report.has(key := f"{config} baseline {baseline.name}"):
                report.add(key, of_baseline(case, baseline, kept_flops))
            if not report.has(plan := f"{config} plan {baseline.name}"):
                report.add(
                    plan,
                    of_plan(case, report[key]["bytes"], False, kept_flops) | everything_seconds,
                )
        least = min(
            r["bytes"] for k, r in report.results.items() if k.startswith(f"{config} baseline")
        )
        if not report.has(key := f"{config} plan 8 % below the least"):
            report.add(
                key, of_plan(case, int(BELOW * least), False, kept_flops) | everything_seconds
            )


def table(report: Report, config: str) -> dict:
    rows, wins = [], {}
    results = report.results
    step = max(
        (r["xla_seconds"] or 0 for k, r in results.items() if k.startswith(f"{config} baseline")),
        default=0,
    )
    for key, plan in results.items():
        if not key.startswith(f"{config} plan ") or not plan["found"]:
            continue
        name = key.removeprefix(f"{config} plan ")
        base = results.get(f"{config} baseline {name}", {})
        row = {"against": name, "plan_bytes": plan["bytes"], "baseline_bytes": base.get("bytes")}
        for what in ("model_extra_seconds", "xla_seconds"):
            row[what] = [base.get(what), plan[what]]
            if base and base.get(what) is not None and plan[what] is not None:
                less = base[what] - plan[what]
                outcome = "win" if less > DRAW * step else "loss" if less < -DRAW * step else "draw"
                row[f"by {what}"] = outcome
                wins.setdefault(what, {}).setdefault(outcome, []).append(name)
        rows.append(row)
    ratios = [
        abs(r["flops_ratio"] - 1)
        for k, r in results.items()
        if k.startswith(config) and "flops_ratio" in r
    ]
    count = {w: {o: len(n) for o, n in found.items()} for w, found in wins.items()}
    return {
        "counts": count,
        "largest deviation of HLO FLOPs": max(ratios, default=None),
        "rows": rows,
    }


def main() -> None:
    report = Report("baselines_h200")
    for config in CONFIGS:
        compare(report, config)
        report.summarise({c: table(report, c) for c in CONFIGS})


if __name__ == "__main__":
    main()
