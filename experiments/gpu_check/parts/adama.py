"""Step times and bytes of one model under each way of accumulating microbatches, run in turns.

A point compiles one way with every layer recomputed. Rounds run all steps. Ratios compare a step
with accumulation in place in the same round. Losses after a few steps from one state show that
every way trains.
"""

import jax

from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.gpu_check.settings import Settings
from experiments.gpu_check.steps import Race, example, usable_bytes
from experiments.steps.step import abstract, make_step
from jaxmem.plans import Assignment, compiled_bytes

ROW = "released_by_row"  # with the row ratio
WAYS = ("scan", "in_place", "multi_steps", "adama", "released", ROW)
PLANS = {"recompute": Assignment.nothing()}
MICROBATCHES, ROUNDS, STEPS = 8, 6, 5
RACES: dict[tuple, Race] = {}


def points(settings: Settings) -> list[str]:
    ways, rounds = (("in_place", "released", ROW), 2) if settings.small else (WAYS, ROUNDS)
    found = [f"{way} {plan}" for plan in PLANS for way in ways]
    return found + [f"round {i}" for i in range(rounds)] + [f"losses {way}" for way in ways]


def config_of(settings: Settings, point: str) -> Config:
    config = settings.config()
    way = point.split()[0]
    count = min(MICROBATCHES, config.train.batch)
    updates = {
        "model": config.model.model_copy(update={"loop": "stack"}),
        "train": config.train.model_copy(update={"microbatches": count}),
        "optimizer": config.optimizer.model_copy(
            update={
                "accumulation": "released" if way == ROW else way,
                "second_moment": "row" if way == ROW else "squares",
                "clip": "value",
            }
        ),
    }
    return config.model_copy(update=updates)


def step_of(settings: Settings, point: str):
    config = config_of(settings, point)
    step = jax.jit(make_step(config, PLANS[point.split()[1]]), donate_argnums=0)
    return step.lower(*abstract(config)).compile()


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    what, name = point.split()
    if what == "losses":
        return {"losses": losses(settings, f"{name} recompute")}
    if what != "round":
        size = compiled_bytes(step_of(settings, point))
        return {"bytes": size, "fits": size <= usable_bytes()}
    race = racing(settings, tuple(p for p, row in rows.items() if row.get("fits")))
    return {"seconds": race.round(int(name)), "left_out": race.failed}


def losses(settings: Settings, point: str) -> list[float]:
    """Returns the losses of the first steps on one batch."""
    config, step, found = config_of(settings, point), step_of(settings, point), []
    state, tokens = example(config)
    for _ in range(STEPS):
        state, metrics = step(state, tokens)
        found.append(float(metrics["loss"]))
    return found


def racing(settings: Settings, chosen: tuple[str, ...]) -> Race:
    """Returns the only race of this process, so that its steps are compiled once for all rounds."""
    if (settings, chosen) not in RACES:
        RACES.clear()
        makers = {p: lambda p=p: step_of(settings, p) for p in chosen}
        configs = {p: config_of(settings, p) for p in chosen}
        RACES[settings, chosen] = Race(settings.config(), makers, configs)
    return RACES[settings, chosen]


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    rounds = [row["seconds"] for point, row in rows.items() if point.startswith("round ")]
    names = [n for n in (rounds[0] if rounds else {}) if all(n in one for one in rounds)]
    base = {n: f"in_place {n.split()[1]}" for n in names}
    return {
        "rounds": len(rounds),
        "microbatches": min(MICROBATCHES, settings.config().train.batch),
        "to accumulation in place": {
            n: {
                "bytes": rows[n]["bytes"] / rows[base[n]]["bytes"],
                "seconds": quartiles([one[n] / one[base[n]] for one in rounds]),
            }
            for n in names
            if base[n] in names
        },
        "losses": {
            p.split()[1]: row["losses"] for p, row in rows.items() if p.startswith("losses ")
        },
        "steps": {n: rows[n] | {"seconds": quartiles([one[n] for one in rounds])} for n in names},
    }
