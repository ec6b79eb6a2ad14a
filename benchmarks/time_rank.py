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

import jaxmem
from benchmarks.shared.assignments import different, drawn, every, show
from benchmarks.shared.baselines import baselines, own_codec
from benchmarks.shared.case import compile_step, local_profile, nano
from benchmarks.shared.results import Report, say, spearman
from benchmarks.shared.timing import cache_compiles, interleaved, over
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
    found["compress_all"] = every(profile, own_codec)
    most = evaluate(profile, found["keep_tags"]).saved_bytes
    fewest = least_bytes(Problem(profile))
    assert fewest is not None
    least = fewest.saved_bytes
    rooms = {
        "planned": (solve, [least + (most - least) * i / (BUDGETS - 1) for i in range(BUDGETS)]),
        "greedy": (
            greedy,
            [least + (most - least) * (i + 1) / (GREEDY + 1) for i in range(GREEDY)],
        ),
    }
    for name, (solver, sizes) in rooms.items():
        for i, room in enumerate(sizes):
            solution = solver(Problem(profile, room=round(room)))
            if solution is not None:
                found[f"{name}_{i}"] = solution.actions
    pick = random.Random(0).choice
    found |= {f"random_{i}": drawn(profile, pick) for i in range(RANDOM)}
    chosen = different(profile, found)
    return {name: effective(profile, actions) for name, actions in chosen.items()}


def main() -> None:
    report = Report("time_rank", rounds=25)
    cache_compiles()
    config = nano()
    profile = local_profile(config)
    chosen, steps = plans(profile), {}
    for name, actions in chosen.items():
        steps[name] = compile_step(config, jaxmem.remat_policy(Assignment(actions)))
        say(f"compiled {name} ({len(steps)}/{len(chosen)})")
    groups = [{name: step} for name, step in steps.items()]
    seconds, worked = interleaved(config, groups, report.chosen["rounds"])
    base = evaluate(profile, chosen[BASE]).seconds
    rows = {}
    for name, actions in chosen.items():
        cost = evaluate(profile, actions)
        rows[name] = {
            "plan": name,
            "predicted_extra_seconds": cost.seconds - base,
            "measured_ratio": over(seconds[name], seconds[BASE]),
            "measured_seconds": quartiles(seconds[name]),
            "least_seconds": min(seconds[name]),
            "core_seconds": quartiles(worked[name]),
            "core_ratio": over(worked[name], worked[BASE]),
            "saved_bytes": cost.saved_bytes,
            "compiled_bytes": compiled_bytes(steps[name]),
            "actions": show(actions),
        }
    report.results = dict(sorted(rows.items(), key=lambda row: row[1]["predicted_extra_seconds"]))
    report.summarise(summary(report) | {"time_source": profile.time_source})


def summary(report: Report) -> dict:
    rows = list(report.results.values())
    rank = lambda measured: spearman([r["predicted_extra_seconds"] for r in rows], measured)
    return {
        "plans": len(rows),
        "spearman": rank([r["measured_ratio"]["median"] for r in rows]),
        "spearman_of_least_seconds": rank([r["least_seconds"] for r in rows]),
        "spearman_of_core_seconds": rank([r["core_ratio"]["median"] for r in rows]),
        "target": 0.9,
        "baseline_seconds": report[BASE]["measured_seconds"],
    }


if __name__ == "__main__":
    main()
