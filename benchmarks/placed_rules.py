"""What is deciding together worth, against deciding one after the other and against fixed rules?

    python -m benchmarks.placed_rules

The models, targets and prices of `benchmarks.placed`, within twelve budgets each, from 5 % above
the program's least to everything on the device; solved alone, without a compile.

- `states first`: where states lie is decided as if every layer were recomputed, then one policy for
  the layers of each place within what is left.
- `actions first`: what layers do is decided as if no state took the link, all of them streamed;
  then where their states lie.
- `states alone`, `all streamed`, `resident`: every layer recomputed; every layer's states in host
  memory; none there.
- `ProTrain`: a block is kept, recomputed or swapped as a whole, its states stream or stay, buffers
  keep some (its four numbers, spec P1 to P5).

A cell is a rule's predicted seconds of the layers over those of the joint plan. `host` is the
same budget with half of the host memory that the joint plan takes: time may not fall by it.
"""

import dataclasses
import itertools
import statistics

from benchmarks import placed
from benchmarks.shared.case import from_to, on
from benchmarks.shared.results import Report
from jaxmem._core.database import Database
from jaxmem._planner.placement.layer import RESIDENT, STREAMED, LayerGroup
from jaxmem._planner.placement.program import (
    PlacementProblem,
    PlacementSolution,
    priced,
    solve_placement,
)

BUDGETS = 12
LEAST = 1.05


def fits(problem: PlacementProblem, one: PlacementSolution) -> bool:
    assert problem.room is not None
    assert problem.host_room is not None
    return one.device_bytes <= problem.room and one.host_bytes <= problem.host_room


def states_first(problem: PlacementProblem) -> PlacementSolution | None:
    first = solve_placement(dataclasses.replace(problem, policies=problem.policies[:1]))
    if first is None:
        return None
    found = []
    for policies in itertools.product(range(len(problem.policies)), repeat=len(first.counts)):
        counts: dict[LayerGroup, int] = {}
        for (kind, n), policy in zip(first.counts.items(), policies):
            counts[LayerGroup(kind.place, policy)] = n
        found.append(priced(problem, counts, first.outer))
    found = [one for one in found if fits(problem, one)]
    return min(found, key=lambda one: one.cautious_seconds, default=None)


def actions_first(problem: PlacementProblem) -> PlacementSolution | None:
    layers = problem.states.layers
    alone = [
        (policy.seconds, w)
        for w, policy in enumerate(problem.policies)
        for one in [priced(problem, {LayerGroup(STREAMED, w): layers}, "pinned_host")]
        if fits(problem, one)
    ]
    if not alone:
        return None
    _, fastest = min(alone)
    return solve_placement(dataclasses.replace(problem, policies=(problem.policies[fastest],)))


def rules(
    simpler: dict[str, PlacementProblem], problem: PlacementProblem
) -> dict[str, PlacementSolution | None]:
    """simpler: the problems of `placed.rules`, for any room."""
    within = lambda name: solve_placement(
        dataclasses.replace(simpler[name], room=problem.room, host_room=problem.host_room)
    )
    return {
        "states first": states_first(problem),
        "actions first": actions_first(problem),
        "states alone": within("states alone"),
        "all streamed": within("all streamed"),
        "resident": solve_placement(dataclasses.replace(problem, places=(RESIDENT,))),
        "ProTrain": within("blocks whole"),
    }


def rooms(problem: PlacementProblem, usable: int) -> list[int]:
    least = solve_placement(dataclasses.replace(problem, room=None), "bytes")
    most = solve_placement(dataclasses.replace(problem, room=None))
    assert least is not None
    assert most is not None
    return from_to(int(LEAST * least.device_bytes), min(most.device_bytes, usable), BUDGETS)


def at(problem: PlacementProblem, simpler: dict[str, PlacementProblem]) -> dict:
    """The joint plan, and the seconds of the others over its own."""
    joint = solve_placement(problem)
    assert joint is not None
    with_less = solve_placement(dataclasses.replace(problem, host_room=joint.host_bytes // 2))
    ratio = lambda one: None if one is None else one.seconds / joint.seconds
    return {
        "room": problem.room,
        "states": str(joint.places),
        "seconds": joint.seconds,
        "solve seconds": joint.solve_seconds,
        "host": ratio(with_less),
        "rules": {name: ratio(one) for name, one in rules(simpler, problem).items()},
    }


def run(report: Report, model: str, target: str) -> None:
    if report.has(key := f"{model}, {target}"):
        return
    with on(target, Database()) as backend:
        search = placed.search_of(model, backend)
        simpler, problem = placed.rules(search), search.within(None)
        sizes = rooms(problem, backend.target.usable_bytes)
        rows = [at(dataclasses.replace(problem, room=room), simpler) for room in sizes]
        report.add(key, {"budgets": rows})


def summary(report: Report) -> dict:
    rows = [row for found in report.results.values() for row in found["budgets"]]
    solves = [row["solve seconds"] for row in rows]
    times = [[r["seconds"] for r in found["budgets"]] for found in report.results.values()]
    pairs = [pair for one in times for pair in itertools.pairwise(one)]
    less = [row["host"] for row in rows if row["host"] is not None]
    return {
        "budgets": len(rows),
        "median solve seconds": statistics.median(solves),
        "most solve seconds": max(solves),
        "rises with the budget": sum(b > a * (1 + 1e-6) for a, b in pairs),
        "falls with less host memory": sum(ratio < 1 - 1e-6 for ratio in less),
    } | placed.of_rules([row["rules"] for row in rows])


def main() -> None:
    Report("placed_rules").for_each(placed.CASES, run, summary)


if __name__ == "__main__":
    main()
