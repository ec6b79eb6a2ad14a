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

from benchmarks.shared.assignments import show
from benchmarks.shared.baselines import Baseline, baselines, compiler_of
from benchmarks.shared.case import Case, case_on
from benchmarks.shared.results import Report
from jaxmem._planner.solve.cost import evaluate, everything
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


def row(case: Case, compiled, actions) -> dict:
    """What is compared of a baseline and of a plan."""
    cost = evaluate(case.profile, actions)
    flops = sum(matmul_flops(e)[0] for e in case.trace(None).jaxpr.jaxpr.eqns)
    flops += sum(b.runs * c.flops for b, c in zip(case.profile.blocks, cost.blocks))
    return {
        "bytes": compiled.total_bytes,
        "host_bytes": compiled.host_bytes,
        "model_extra_seconds": cost.seconds,
        "xla_seconds": compiled.xla_seconds,
        "flops_ratio": compiled.matmul_flops / flops,
        "actions": show(actions),
    }


def of_baseline(case: Case, baseline: Baseline) -> dict:
    compiled = compiler_of(case, baseline).compile(baseline.actions)[0].compiled
    model = {"model_is": "exact" if baseline.exact else "the nearest keep-set"}
    return row(case, compiled, baseline.actions) | model


def of_plan(case: Case, at_bytes: int) -> dict:
    """A plan of no more than `at_bytes` as compiled."""
    plan, told = case.attempt(case.budget_for(at_bytes))
    told |= {"at_bytes": at_bytes, "everything_extra_seconds": everything(case.profile).seconds}
    if plan is None:
        return told
    compiled = case.compile(plan.actions)[0].compiled
    return told | row(case, compiled, plan.actions) | {"bytes": plan.compiled_bytes}


def compare(report: Report, config: str) -> None:
    with case_on(TARGET, config) as case:
        for baseline in sorted(baselines(case.profile), key=lambda b: b.name not in FIRST):
            key = f"{config} baseline {baseline.name}"
            at = report.once(key, of_baseline, case, baseline)["bytes"]
            report.once(f"{config} plan {baseline.name}", of_plan, case, at)
        least = min(r["bytes"] for r in report.under(f"{config} baseline ").values())
        report.once(f"{config} plan 8 % below the least", of_plan, case, int(BELOW * least))


def of_case(report: Report, config: str) -> dict:
    rows, counts = [], {}
    bases, plans = (report.under(f"{config} {what} ") for what in ("baseline", "plan"))
    step = max(r["xla_seconds"] or 0 for r in bases.values())
    for name, plan in plans.items():
        if not plan["found"]:
            continue
        base = bases.get(name, {})
        row = {"against": name, "plan_bytes": plan["bytes"], "baseline_bytes": base.get("bytes")}
        for what in ("model_extra_seconds", "xla_seconds"):
            row[what] = [base.get(what), plan[what]]
            if None not in row[what]:
                less = (base[what] - plan[what]) / step
                outcome = "win" if less > DRAW else "loss" if less < -DRAW else "draw"
                row[f"by {what}"] = outcome
                of = counts.setdefault(what, {})
                of[outcome] = of.get(outcome, 0) + 1
        rows.append(row)
    found = [*bases.values(), *(r for r in plans.values() if r["found"])]
    deviation = max(abs(r["flops_ratio"] - 1) for r in found)
    return {"counts": counts, "largest deviation of HLO FLOPs": deviation, "rows": rows}


def main() -> None:
    Report("baselines_h200").of_each(CONFIGS, compare, of_case)


if __name__ == "__main__":
    main()
