"""Compares predicted with measured step times, for plans of several sets of actions and budgets.
Steps run in turns.

The model has few layers, since the times of one layer do not depend on the number of layers. The
summary has Spearman's correlation over plans that differ, and the relative error of each prediction
against the median of measured seconds.
"""

import functools
import math
from typing import Any

from scipy.stats import spearmanr

from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.gpu_check.settings import Settings
from experiments.gpu_check.steps import Race, plan_row, planned, under
from jaxmem.plans import LOSSLESS, Action, compiled_bytes

SETS = {
    "all": None,
    "lossless": LOSSLESS,
    "compress": tuple(a for a in Action if not a.offloads),
}
SHARES, ROUNDS, LAYERS = (0.08, 0.2, 0.35, 0.5, 0.7), 10, 6
ENDS = ("nothing_saveable", "keep_everything")
RACES: dict[tuple, Race] = {}


def points(settings: Settings) -> list[str]:
    shares, rounds = ((0.2, 0.6), 2) if settings.small else (SHARES, ROUNDS)
    plans = [f"plan {name} {share}" for share in shares for name in SETS]
    return [*(f"end {name}" for name in ENDS), *plans, *(f"round {i}" for i in range(rounds))]


def config_of(settings: Settings) -> Config:
    return settings.config(None, f"model.layers={LAYERS}")


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    what, name, *rest = point.split()
    config = config_of(settings)
    if what == "end":
        return {"bytes": compiled_bytes(under(config, name))}
    if what == "plan":
        low, high = (rows[f"end {end}"]["bytes"] for end in ENDS)
        return plan_row(config, int(low + float(rest[0]) * (high - low)), SETS[name])
    race = racing(settings, rows)
    return {"seconds": race.round(int(name)), "left_out": race.failed}


def racing(settings: Settings, rows: dict[str, dict]) -> Race:
    """Returns the only race of this process, between everything kept and the plans that differ."""
    config, found = config_of(settings), {}
    makers = {"end keep_everything": functools.partial(under, config, "keep_everything")}
    for point, row in rows.items():
        if "plan" in row and row["stored"] not in found.values():
            found[point] = row["stored"]
            makers[point] = functools.partial(planned, config, row)
    key = settings, tuple(makers)
    if key not in RACES:
        RACES.clear()
        RACES[key] = Race(config, makers)
    return RACES[key]


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    rounds = [row["seconds"] for point, row in rows.items() if point.startswith("round ")]
    plans = [
        n
        for n in (rounds[0] if rounds else {})
        if n.startswith("plan ") and all(n in one for one in rounds)
    ]
    if len(plans) < 2:
        return {"plans": len(plans)}
    measured = {n: quartiles([one[n] for one in rounds]) for n in ("end keep_everything", *plans)}
    predicted = {n: rows[n]["predicted_seconds"] for n in plans}
    predicted["end keep_everything"] = rows[plans[0]]["baseline_seconds"]
    apart = {n: predicted[n] / measured[n]["median"] - 1 for n in measured}
    ranked: Any = spearmanr([predicted[n] for n in plans], [measured[n]["median"] for n in plans])
    base = "end keep_everything"
    more = {
        n: [predicted[n] / predicted[base], measured[n]["median"] / measured[base]["median"]]
        for n in plans
    }
    return {
        "plans": len(plans),
        "rounds": len(rounds),
        "spearman": None if math.isnan(ranked.statistic) else float(ranked.statistic),
        "relative_error": quartiles([abs(a) for a in apart.values()]),
        "against_keeping_everything_predicted_and_measured": more,
        "steps": {
            n: {"predicted_seconds": predicted[n], "seconds": measured[n], "apart": apart[n]}
            for n in measured
        },
    }
