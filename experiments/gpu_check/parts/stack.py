"""Compares step times of one model with its layers in jaxmem.stack and in jax.lax.scan, under equal
actions, run in turns.

A point compiles one loop under one assignment of actions to all tags. Rounds run all steps. The
ratio is stack / scan in one round. "groups": the first half of the layers offloads tags, the other
half keeps every tag.
"""

import jax

from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.gpu_check.settings import Settings
from experiments.gpu_check.steps import Race, usable_bytes
from experiments.running.policies import KINDS, own
from experiments.steps.step import abstract, make_step
from jaxmem.plans import Action, Assignment, Choice, compiled_bytes

ACTIONS = ("everything", *Action)
LOOPS = ("scan", "stack")
ROUNDS = 12
RACES: dict[tuple, Race] = {}


def points(settings: Settings) -> list[str]:
    actions, rounds = (("keep", "offload"), 2) if settings.small else (ACTIONS, ROUNDS)
    found = [f"{loop} {action}" for action in actions for loop in LOOPS] + ["stack groups"]
    return found + [f"round {i}" for i in range(rounds)]


def every_tag(name: str) -> dict[str, Choice]:
    return {
        tag: Choice(Action(name), own(kind) if Action(name).names_codec else None)
        for tag, kind in KINDS.items()
    }


def plan_of(action: str, layers: int):
    if action == "everything":
        return None
    if action == "groups":
        half = layers // 2
        return Assignment(
            {f"block[0:{half}]": every_tag("offload"), f"block[{half}:{layers}]": every_tag("keep")}
        )
    return Assignment(others=every_tag(action))


def step_of(config: Config, point: str):
    loop, action = point.split()
    model = config.model.model_copy(update={"loop": loop})
    config = config.model_copy(update={"model": model})
    step = jax.jit(make_step(config, plan_of(action, model.layers)), donate_argnums=0)
    return step.lower(*abstract(config)).compile()


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    config = settings.config()
    if not point.startswith("round "):
        size = compiled_bytes(step_of(config, point))
        return {"bytes": size, "fits": size <= usable_bytes()}
    race = racing(settings, tuple(p for p, row in rows.items() if row.get("fits")))
    return {"seconds": race.round(int(point.split()[1])), "left_out": race.failed}


def racing(settings: Settings, chosen: tuple[str, ...]) -> Race:
    """Returns the only race of this process, so that its steps are compiled once for all rounds."""
    if (settings, chosen) not in RACES:
        RACES.clear()
        config = settings.config()
        RACES[settings, chosen] = Race(config, {p: lambda p=p: step_of(config, p) for p in chosen})
    return RACES[settings, chosen]


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    rounds = [row["seconds"] for point, row in rows.items() if point.startswith("round ")]
    names = [n for n in (rounds[0] if rounds else {}) if all(n in one for one in rounds)]
    pairs = [(f"scan {a}", f"stack {a}") for a in ACTIONS]
    pairs = [(scan, stack) for scan, stack in pairs if scan in names and stack in names]
    return {
        "rounds": len(rounds),
        "stack to scan": {
            stack: {
                "bytes": rows[stack]["bytes"] / rows[scan]["bytes"],
                "seconds": quartiles([one[stack] / one[scan] for one in rounds]),
            }
            for scan, stack in pairs
        },
        "steps": {n: rows[n] | {"seconds": quartiles([one[n] for one in rounds])} for n in names},
    }
