"""Compares step times of plans and of hand-written policies, for one model, run in turns.

First each baseline is compiled. The bytes of some baselines, spread over their range, are the
budgets of plans, and two of these budgets are also given to MaxText's estimator. Then rounds run
every step that fits. A plan is compared with each baseline within its budget by the ratio
plan / baseline in one round: below 1 the plan is faster.
"""

import functools

import numpy as np

from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.gpu_check.settings import Settings
from experiments.gpu_check.steps import Race, plan_row, planned, under, usable_bytes
from experiments.running.planning import compile_candidate, named
from experiments.running.policies import Candidate, policy_of
from jaxmem.plans import Choice, compiled_bytes

NAMES = (
    "keep_everything", "nothing_saveable", "minimal_with_context", "save_qkv_proj",
    "dots_with_no_batch_dims_saveable", "minimal", "save_out_proj", "keep_tags", "every_k=2",
    "every_k=3", "every_k=4", "minimal_offloaded", "qkv_proj_offloaded",
    "offload_dot_with_no_batch_dims",
)  # fmt: skip
TINY = ("keep_everything", "nothing_saveable", "save_qkv_proj", "every_k=2")
BUDGETS, ESTIMATED, ROUNDS = 4, (1, 2), 12
RACES: dict[tuple, Race] = {}


def points(settings: Settings) -> list[str]:
    names, rounds, estimated = (
        (TINY, 2, ESTIMATED[:1]) if settings.small else (NAMES, ROUNDS, ESTIMATED)
    )
    found = [f"baseline {n}" for n in names] + [f"plan {i}" for i in range(BUDGETS)]
    return found + [f"estimator {i}" for i in estimated] + [f"round {i}" for i in range(rounds)]


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    what, name = point.split()
    config = settings.config()
    if what == "baseline":
        size = compiled_bytes(under(config, name))
        return {"bytes": size, "fits": size <= usable_bytes()}
    if what == "plan":
        return plan_row(config, budgets(rows)[int(name)])
    if what == "estimator":
        remat = config.remat.model_copy(update={"policy": "estimator"})
        plan = config.plan.model_copy(update={"budget": budgets(rows)[int(name)]})
        ready = named(config.model_copy(update={"remat": remat, "plan": plan}))
        return {
            "bytes": ready.compiled_bytes,
            "fits": True,
            "found": ready.found,
            "compiles": ready.compiles,
        }
    race = racing(settings, rows)
    return {"seconds": race.round(int(name)), "left_out": race.failed}


def budgets(rows: dict[str, dict]) -> list[int]:
    """Returns budgets, spread over the bytes of the baselines that fit and take less than
    everything kept.
    """
    fitting = {
        p: r["bytes"] for p, r in rows.items() if p.startswith("baseline ") and r.get("fits")
    }
    everything = fitting.get("baseline keep_everything", usable_bytes() + 1)
    sizes = sorted({b for b in fitting.values() if b < everything})
    if not sizes:
        raise ValueError(
            "no baseline fits into this device, so there is nothing to compare a plan with"
        )
    places = np.linspace(0, len(sizes) - 1, BUDGETS)
    if len(sizes) >= BUDGETS:
        places = places.round()
    return [int(b) for b in np.interp(places, range(len(sizes)), sizes)]


def makers(settings: Settings, rows: dict[str, dict]) -> dict:
    """Returns functions that compile the steps of the race, by point."""
    config, found = settings.config(), {}
    for point, row in rows.items():
        what, name = point.split()
        if what == "baseline" and row.get("fits"):
            found[point] = functools.partial(under, config, name)
        elif what == "plan" and "plan" in row:
            found[point] = functools.partial(planned, config, row)
        elif what == "estimator" and "found" in row:
            found[point] = functools.partial(estimated, config, row)
    return found


def estimated(config: Config, row: dict):
    """Compiles the step that the estimator found in `row`."""
    chosen = {tag: Choice(action) for tag, action in row["found"]["actions"].items()}
    return compile_candidate(config, Candidate(policy_of(chosen)))


def racing(settings: Settings, rows: dict[str, dict]) -> Race:
    """Returns the only race of this process, so that its steps are compiled once for all rounds."""
    found = makers(settings, rows)
    key = settings, tuple(found)
    if key not in RACES:
        RACES.clear()
        RACES[key] = Race(settings.config(), found)
    return RACES[key]


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    rounds = [row["seconds"] for point, row in rows.items() if point.startswith("round ")]
    names = [n for n in (rounds[0] if rounds else {}) if all(n in one for one in rounds)]
    seconds = {n: quartiles([one[n] for one in rounds]) for n in names}
    tokens = settings.config().train.batch * settings.config().train.sequence
    steps = {
        n: {"bytes": rows[n]["bytes"], "seconds": q, "tokens_per_second": tokens / q["median"]}
        for n, q in seconds.items()
    }
    found = {}
    for plan in (n for n in names if n.startswith("plan ")):
        others = [
            n
            for n in names
            if not n.startswith("plan ") and rows[n]["bytes"] <= rows[plan]["budget_bytes"]
        ]
        ratios = {n: quartiles([one[plan] / one[n] for one in rounds]) for n in others}
        best = min(others, key=lambda n: seconds[n]["median"], default=None)
        found[plan] = {
            "budget_bytes": rows[plan]["budget_bytes"],
            "predicted_seconds": rows[plan]["predicted_seconds"],
            "best_baseline": best,
            "against_best": ratios.get(best) if best else None,
            "faster_than_best": ratios[best]["upper_quartile"] < 1 if best else None,
            "ratios": ratios,
        }
    return {"rounds": len(rounds), "plans": found, "steps": steps}
