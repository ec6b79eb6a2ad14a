"""Are plans that place states as predicted, and faster than simpler rules?

    python -m benchmarks.placed

A GPT and a Llama of 24 layers (width 2048, 8 sequences of 1024 in a microbatch, two of them),
released, with float32 states, planned for three GPUs that are not there, within five budgets each:
from a little more than the least that compiles to what everything takes there.

- `error` is what was predicted of a plan's device bytes, before its compile, against what it
  compiles to; `first error` that of the search's first compile, before any had taught. Host bytes
  are compared exactly.
- `seconds` are those of the layers, as predicted. `rules` has the same of simpler plans within the
  same bytes, by the same program and prices: every layer recomputed (`states alone`), every layer's
  states in host memory (`all streamed`), and ProTrain's choices for a block, which is kept,
  recomputed or swapped as a whole, without copies (`blocks whole`).

No step is run.
"""

import dataclasses
import itertools
import statistics
from typing import Any

from benchmarks.shared.case import from_to, on
from benchmarks.shared.released import MODELS, config_of, planned_step
from benchmarks.shared.results import Report
from jaxmem._core.actions import ALL, KEEP, LOSSLESS, OFFLOAD, REST
from jaxmem._core.database import Database
from jaxmem._cost.profile.options import Allowed
from jaxmem._planner.placement.front import layer_policy
from jaxmem._planner.placement.layer import BUFFERED, RESIDENT, STREAMED
from jaxmem._planner.placement.plan import read_places
from jaxmem._planner.placement.program import PlacementProblem, solve_placement
from jaxmem._planner.placement.search import PlacedTrial, PlacementSearch, with_working
from jaxmem._planner.search.trial import Limits
from jaxmem._target.devices.support import allowed_actions
from jaxmem._target.devices.target import Target

MICROBATCHES = 2
CASES = tuple(itertools.product(MODELS, ("h200", "rtx4090", "a100-80gb")))
BUDGETS = 5
LEAST = 1.03  # of what the program's least compiles to


def search_of(model: str, backend) -> PlacementSearch:
    build, args = planned_step(config_of(model, MICROBATCHES))
    target = backend.target
    limits = Limits(target.usable_bytes, target.usable_bytes, target.host_bytes)
    lossless, _ = allowed_actions(LOSSLESS, target)
    actions = tuple(a for a in ALL if a in lossless)
    return read_places(build, args, backend, limits, Allowed(actions, actions))


def rules(search: PlacementSearch) -> dict[str, PlacementProblem]:
    """The problems that simpler plans solve."""
    problem, profile, block = search.within(None), search.profile, search.block
    offloaded = {t.name: OFFLOAD for t in block.tags if any(o.host_bytes for o in t.options)}
    whole = [{}, {REST: KEEP}, offloaded]
    policies = [layer_policy(profile, block, choices) for choices in whole]
    policies = with_working(policies, search.steps, block.name, search.others)
    given = {"states alone": {"policies": policies[:1]}, "all streamed": {"places": (STREAMED,)}}
    given["blocks whole"] = {"policies": policies, "places": (RESIDENT, STREAMED, BUFFERED)}
    return {name: dataclasses.replace(problem, **how) for name, how in given.items()}


def rooms(search: PlacementSearch, target: Target) -> list[int]:
    least, most = search.least(), solve_placement(search.within(None))
    assert least is not None
    assert most is not None
    compiled = search.steps.compile(search.assignment(least), least.places)
    most_bytes = min(most.device_bytes, target.usable_bytes)
    return from_to(int(LEAST * compiled.total), most_bytes, BUDGETS)


def bytes_of(best: PlacedTrial) -> dict[str, Any]:
    """Where a plan places states, and its bytes, as predicted and as compiled."""
    return {
        "states": str(best.solution.places),
        "predicted": best.predicted_bytes,
        "compiled": best.total,
        "error": best.predicted_bytes / best.total - 1,
        "host predicted": best.solution.host_bytes,
        "host compiled": best.step.host_bytes,
    }


def at(
    unlimited: PlacementSearch, simpler: dict[str, PlacementProblem], room: int
) -> dict[str, Any]:
    """What is found within so many bytes."""
    within = lambda problem: dataclasses.replace(problem, room=room)
    limits = dataclasses.replace(unlimited.limits, usable_bytes=room)
    search = dataclasses.replace(unlimited, limits=limits, tried=[])
    best, first = search.run(), search.tried[0]
    row = {
        "room": room,
        "compiles": len(search.tried),
        "solve seconds": search.solve_seconds,
        "first error": first.predicted_bytes / first.total - 1,
    }
    if best is None:
        return row
    short = {"short": search.error}
    others = {
        name: solve_placement(dataclasses.replace(within(problem), **short))
        for name, problem in simpler.items()
    }
    return (
        row
        | bytes_of(best)
        | {
            "seconds": best.solution.seconds,
            "rules": {name: a and a.seconds for name, a in others.items()},
        }
    )


def run(report: Report, model: str, target: str) -> None:
    keys = [f"{model}, {target}, {i}" for i in range(BUDGETS)]
    if all(map(report.has, keys)):
        return
    with on(target, Database()) as backend:
        unlimited = search_of(model, backend)
        simpler = rules(unlimited)
        for key, room in zip(keys, rooms(unlimited, backend.target)):
            report.once(key, at, unlimited, simpler, room)


def summary(report: Report) -> dict:
    rows = [r for r in report.results.values() if "error" in r]
    size = lambda name: sorted(abs(r[name]) for r in rows)
    told: dict[str, Any] = {"plans": len(rows), "of": len(report.results)}
    for name in ("error", "first error"):
        told |= {f"median {name}": statistics.median(size(name)), f"worst {name}": size(name)[-1]}
    told["host bytes exact"] = sum(r["host predicted"] == r["host compiled"] for r in rows)
    told["most solve seconds"] = max(r["solve seconds"] for r in rows)
    return told | of_rules(
        [{n: s and s / r["seconds"] for n, s in r["rules"].items()} for r in rows]
    )


def of_rules(rows: list[dict[str, float | None]]) -> dict[str, dict]:
    """By rule: how many times as long it takes as the joint plan, where it finds one."""
    found = {rule: [ratio for row in rows if (ratio := row[rule])] for rule in rows[0]}
    return {
        rule: {
            "found": len(ratios),
            "times as long": statistics.geometric_mean(ratios) if ratios else None,
            "least": min(ratios, default=None),
            "most": max(ratios, default=None),
        }
        for rule, ratios in found.items()
    }


def main() -> None:
    Report("placed").for_each(CASES, run, summary)


if __name__ == "__main__":
    main()
