"""Do predicted step times rank plans as a clock does? gpt_nano on this CPU, plans spread over the
range of bytes.

Plans: the planner's own at budgets spread over the range, greedy ones, random assignments,
everything kept, recomputed or compressed, and name policies. Each is compiled; then rounds run
every step once, in an order of the round's own. A plan's time is the median over rounds of its
ratio to the round's step with everything kept; predictions are the cost model's seconds on top of
that step. Target: Spearman's correlation of at least 0.9. It is also given for the least seconds of
any round, and for the seconds that the cores worked, both of which other programs on the machine
disturb less. Times that the profile needs are read from jaxmem's database where they are known
(XDG_CACHE_HOME moves it).

Command:  python -m benchmarks.time_rank [--out FILE] [--rounds N]
"""

import random
from typing import Any

from scipy.stats import spearmanr

import jaxmem
from benchmarks.shared.baselines import baselines, of_choices, own_codec
from benchmarks.shared.case import compile_step, local_profile, nano, show
from benchmarks.shared.results import Report, say
from benchmarks.shared.timing import cache_compiles, interleaved
from experiments.gpu_check.measure import quartiles
from jaxmem._core.actions import Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.cost import effective, evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem.plans import compiled_bytes
from tests.shared.greedy import greedy

BUDGETS, GREEDY, RANDOM = 10, 3, 8
NAMED = (
    "keep_everything",
    "keep_tags",
    "nothing_saveable",
    "save_qkv_proj",
    "minimal",
    "minimal_with_context",
)
BASE = "keep_everything"


def plans(profile: Profile) -> dict[str, Actions]:
    """Assignments that differ, by name."""
    found = {b.name: b.actions for b in baselines(profile) if b.name in NAMED}
    found["compress_all"] = of_choices("", profile, own_codec).actions
    most = evaluate(profile, found["keep_tags"]).saved_bytes
    fewest = least_bytes(Problem(profile))
    assert fewest is not None
    least = fewest.saved_bytes
    for i in range(BUDGETS):
        solution = solve(Problem(profile, room=round(least + (most - least) * i / (BUDGETS - 1))))
        assert solution is not None
        found[f"planned_{i}"] = solution.actions
    for i in range(GREEDY):
        solution = greedy(
            Problem(profile, room=round(least + (most - least) * (i + 1) / (GREEDY + 1)))
        )
        if solution is not None:
            found[f"greedy_{i}"] = solution.actions
    rng = random.Random(0)
    for i in range(RANDOM):
        actions: Actions = {b.name: {} for b in profile.blocks}
        for (block, tag), choices in Problem(profile).open_choices().items():
            actions[block][tag] = rng.choice(choices)
        found[f"random_{i}"] = actions
    unique: dict[str, str] = {}
    for name, actions in found.items():
        unique.setdefault(repr(sorted(effective(profile, actions).items())), name)
    return {name: effective(profile, found[name]) for name in unique.values()}


def main() -> None:
    report = Report("time_rank", rounds=25)
    rounds = report.chosen["rounds"]
    cache_compiles()
    config = nano()
    profile = local_profile(config)
    chosen = plans(profile)
    steps = {}
    for name, actions in chosen.items():
        steps[name] = compile_step(config, jaxmem.remat_policy(Assignment(actions)))
        say(f"compiled {name} ({len(steps)}/{len(chosen)})")
    seconds, worked = interleaved(config, [{name: step} for name, step in steps.items()], rounds)
    base = evaluate(profile, chosen[BASE]).seconds
    rows = []
    for name, actions in chosen.items():
        cost = evaluate(profile, actions)
        rows.append(
            {
                "plan": name,
                "predicted_extra_seconds": cost.seconds - base,
                "measured_ratio": quartiles([s / b for s, b in zip(seconds[name], seconds[BASE])]),
                "measured_seconds": quartiles(seconds[name]),
                "least_seconds": min(seconds[name]),
                "core_seconds": quartiles(worked[name]),
                "core_ratio": quartiles([s / b for s, b in zip(worked[name], worked[BASE])]),
                "saved_bytes": cost.saved_bytes,
                "compiled_bytes": compiled_bytes(steps[name]),
                "actions": show(actions),
            }
        )
    rows.sort(key=lambda r: r["predicted_extra_seconds"])
    predicted = [r["predicted_extra_seconds"] for r in rows]
    summary = {
        "plans": len(rows),
        "spearman": rank(predicted, [r["measured_ratio"]["median"] for r in rows]),
        "spearman_of_least_seconds": rank(predicted, [r["least_seconds"] for r in rows]),
        "spearman_of_core_seconds": rank(predicted, [r["core_ratio"]["median"] for r in rows]),
        "target": 0.9,
        "time_source": profile.time_source,
        "baseline_seconds": quartiles(seconds[BASE]),
    }
    report.results = {r["plan"]: r for r in rows}
    for r in rows:
        low, mid, high = (
            r["measured_ratio"][k] for k in ("lower_quartile", "median", "upper_quartile")
        )
        size = f"{r['compiled_bytes'] / 2**20:.0f} MiB"
        print(
            f"{r['plan']:20} predicted {r['predicted_extra_seconds'] * 1e3:+8.1f} ms   measured"
            f" x{mid:.3f}"
            f" ({low:.3f} to {high:.3f}), cores x{r['core_ratio']['median']:.3f}, {size}"
        )
    print(
        f"Spearman {summary['spearman']:.3f} over {len(rows)} plans, {rounds} rounds (target"
        f" 0.9); of the least seconds {summary['spearman_of_least_seconds']:.3f}, of the cores'"
        f" {summary['spearman_of_core_seconds']:.3f}"
    )
    report.summarise(summary)


def rank(predicted, measured) -> float:
    result: Any = spearmanr(predicted, measured)
    return float(result.statistic)


if __name__ == "__main__":
    main()
