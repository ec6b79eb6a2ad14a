"""A plan at exactly the bytes of each baseline, against it by the clock: gpt_nano on this CPU.

Each baseline's step is compiled; its bytes are the budget of a plan. Where that plan compresses, a
lossless one is made too. Then rounds run every baseline and its plans one after the other, in an
order of the round's own. What is reported is the ratio of times plan / baseline within a round
(below 1: the plan is faster): median and quartiles over rounds.

Command:  python -m benchmarks.baselines_cpu [--out FILE] [--rounds N]
"""

import jaxmem
from benchmarks.shared.baselines import WITH_NAIVE, baselines
from benchmarks.shared.case import Case, compile_step, nano, on
from benchmarks.shared.results import Report, say
from benchmarks.shared.timing import Seconds, cache_compiles, interleaved, over
from experiments.gpu_check.measure import quartiles
from jaxmem._core.actions import ALL, LOSSLESS
from jaxmem._planner.solve.cost import evaluate, everything
from jaxmem.plans import compiled_bytes

LEFT_OUT = ("keep_everything",)  # a plan at its bytes is the same program


def plans_at(case: Case, budget: int) -> dict[str, tuple[jaxmem.Plan | None, dict]]:
    """The plan for `budget` bytes, and a lossless one if it compresses, each with its row."""
    found = {"plan": case.attempt(budget, actions=ALL)}
    plan = found["plan"][0]
    if plan is None or not lossless(plan):
        found["lossless_plan"] = case.attempt(budget, actions=LOSSLESS)
    return found


def lossless(plan: jaxmem.Plan) -> bool:
    codecs = {c.codec for choices in plan.actions.values() for c in choices.values() if c.codec}
    return not {c for c in codecs if not c.startswith("bit_mask")}


def described(plan: jaxmem.Plan | None, row: dict) -> dict:
    return row if plan is None else row | {"lossless": lossless(plan)}


def ratios(seconds: Seconds, name: str) -> dict[str, dict[str, float]]:
    """Plan / baseline within a round: quartiles over rounds."""
    own = {k.removeprefix(f"{name}/"): s for k, s in seconds.items() if k.startswith(f"{name}/")}
    base = own.pop("baseline")
    return {which: over(plan, base) for which, plan in own.items()}


def main() -> None:
    report = Report("baselines_cpu", rounds=25)
    cache_compiles()
    case = Case(nano(), on("local"), codecs=WITH_NAIVE)
    chosen = [b for b in baselines(case.profile) if b.name not in LEFT_OUT]
    groups, plans = [], {}
    for baseline in chosen:
        name, step = baseline.name, compile_step(case.config, baseline.policy)
        say(f"{name}: {compiled_bytes(step)} bytes")
        plans[name] = plans_at(case, compiled_bytes(step))
        steps = {f"{name}/{k}": plan.step for k, (plan, _) in plans[name].items() if plan}
        groups.append({f"{name}/baseline": step} | steps)
    clock, cores = interleaved(case.config, groups, report.chosen["rounds"])
    nothing = everything(case.profile).seconds
    for baseline, group in zip(chosen, groups, strict=True):
        name = baseline.name
        report.results[name] = {
            "baseline": name,
            "bytes": compiled_bytes(group[f"{name}/baseline"]),
            "lossless": not baseline.lossy,
            "seconds": quartiles(clock[f"{name}/baseline"]),
            "predicted_extra_seconds": evaluate(case.profile, baseline.actions).seconds - nothing,
            "plans": {k: described(*found) for k, found in plans[name].items()},
            "ratios": ratios(clock, name),
            "ratios_of_core_seconds": ratios(cores, name),
        }
    report.summarise(summary(report))


def summary(report: Report) -> dict:
    rows = report.results.values()
    of_plan = [row["ratios"]["plan"] for row in rows if "plan" in row["ratios"]]
    return {
        "faster": sum(ratio["upper_quartile"] < 1 for ratio in of_plan),
        "slower": sum(ratio["lower_quartile"] > 1 for ratio in of_plan),
        "no_plan": len(rows) - len(of_plan),
        "of": len(rows),
    }


if __name__ == "__main__":
    main()
