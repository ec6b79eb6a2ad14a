"""A plan at exactly the bytes of each baseline, against it by the clock: gpt_nano on this CPU.

Each baseline's step is compiled; its bytes are the budget of a plan. Where that plan compresses, a
lossless one is made too. Then rounds run every baseline and its plans one after the other, in an
order of the round's own. What is reported is the ratio of times plan / baseline within a round
(below 1: the plan is faster): median and quartiles over rounds.

Command:  python -m benchmarks.baselines_cpu [--out FILE] [--rounds N]
"""

import functools

import jaxmem
from benchmarks.shared.baselines import WITH_NAIVE, Baseline, baselines
from benchmarks.shared.case import compile_step, local_profile, nano
from benchmarks.shared.results import Report, say
from benchmarks.shared.timing import Seconds, cache_compiles, interleaved
from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import ALL, LOSSLESS, REST
from jaxmem._planner.solve.cost import evaluate, everything
from jaxmem.plans import compiled_bytes

LEFT_OUT = ("keep_everything",)  # a plan at its bytes is the same program


def plans_at(config: Config, budget: int) -> dict[str, jaxmem.Plan | str]:
    """The plan for `budget` bytes, and a lossless one if it compresses; a text says why there is
    none.
    """
    found: dict[str, jaxmem.Plan | str] = {}
    for name, actions in (("plan", ALL), ("lossless_plan", LOSSLESS)):
        if name == "plan" or not lossless(found["plan"]):
            try:
                build = functools.partial(make_step, config)
                found[name] = jaxmem.plan(build, *abstract(config), budget=budget, actions=actions)
            except jaxmem.errors.BudgetError as error:
                found[name] = str(error)
    return found


def lossless(plan: jaxmem.Plan | str) -> bool:
    if isinstance(plan, str):
        return False
    codecs = {c.codec for choices in plan.actions.values() for c in choices.values() if c.codec}
    return not {c for c in codecs if not c.startswith("bit_mask")}


def describe(plan: jaxmem.Plan | str) -> dict:
    if isinstance(plan, str):
        return {"error": plan}
    tags = {t: str(c) for choices in plan.actions.values() for t, c in choices.items()}
    stored = (
        {"everything": "keep"}
        if REST in tags
        else {t: c for t, c in tags.items() if c != "recompute"}
    )
    return {
        "compiled_bytes": plan.compiled_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "compiles": plan.compiles,
        "lossless": lossless(plan),
        "stored": stored,
    }


def timed(config: Config, found: dict[Baseline, tuple], rounds: int) -> list[dict[str, Seconds]]:
    """By the clock and of the cores' work: baseline -> "baseline", "plan", "lossless_plan" ->
    seconds by round.
    """
    groups = [
        {f"{b.name}/baseline": step}
        | {f"{b.name}/{k}": p.step for k, p in plans.items() if not isinstance(p, str)}
        for b, (step, plans) in found.items()
    ]
    both = []
    for measured in interleaved(config, groups, rounds):
        both.append({b.name: {} for b in found})
        for name, seconds in measured.items():
            baseline, which = name.split("/")
            both[-1][baseline][which] = seconds
    return both


def ratios(own: Seconds) -> dict[str, dict[str, float]]:
    """Plan / baseline within a round: quartiles over rounds."""
    pairs = {k: zip(own[k], own["baseline"]) for k in own if k != "baseline"}
    return {k: quartiles([p / b for p, b in both]) for k, both in pairs.items()}


def main() -> None:
    report = Report("baselines_cpu", rounds=25)
    cache_compiles()
    config = nano()
    profile = local_profile(config, codecs=WITH_NAIVE)
    found: dict[Baseline, tuple] = {}
    for baseline in baselines(profile):
        if baseline.name not in LEFT_OUT:
            step = compile_step(config, baseline.policy)
            found[baseline] = step, plans_at(config, compiled_bytes(step))
            say(f"{baseline.name}: {compiled_bytes(step)} bytes")
    clock, cores = timed(config, found, report.chosen["rounds"])
    rows = []
    for baseline, (step, plans) in found.items():
        rows.append(
            {
                "baseline": baseline.name,
                "bytes": compiled_bytes(step),
                "lossless": not baseline.lossy,
                "seconds": quartiles(clock[baseline.name]["baseline"]),
                "predicted_extra_seconds": evaluate(profile, baseline.actions).seconds
                - everything(profile).seconds,
                "plans": {k: describe(p) for k, p in plans.items()},
                "ratios": ratios(clock[baseline.name]),
                "ratios_of_core_seconds": ratios(cores[baseline.name]),
            }
        )
    wins = {
        "faster": sum(
            r["ratios"]["plan"]["upper_quartile"] < 1 for r in rows if "plan" in r["ratios"]
        ),
        "slower": sum(
            r["ratios"]["plan"]["lower_quartile"] > 1 for r in rows if "plan" in r["ratios"]
        ),
        "no_plan": sum("plan" not in r["ratios"] for r in rows),
        "of": len(rows),
    }
    report.results = {r["baseline"]: r for r in rows}
    report.summarise(wins)
    for r in rows:
        print(
            f"{r['baseline']:34} {r['bytes'] / 2**20:6.1f} MiB  {r['seconds']['median'] * 1e3:5.0f}"
            " ms",
            end="",
        )
        for name, q in r["ratios"].items():
            share = r["plans"][name]["compiled_bytes"] / r["bytes"]
            print(
                f"  {name} x{q['median']:.3f} ({q['lower_quartile']:.3f} to"
                f" {q['upper_quartile']:.3f})",
                end="",
            )
            print(f" at {share:.1%} of the bytes", end="")
        print("".join(f"  {k}: none" for k, p in r["plans"].items() if "error" in p))
    print(
        f"quartiles clear of 1: {wins['faster']} faster, {wins['slower']} slower, of {wins['of']}"
    )


if __name__ == "__main__":
    main()
