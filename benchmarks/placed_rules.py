"""What is deciding together worth, against deciding one after the other and against fixed rules?

    python -m benchmarks.placed_rules

The models, targets and prices of `benchmarks.placed`, within twelve budgets each, from 5 % above
the program's least to everything on the device; solved alone, without a compile.

- `states first`: where states lie is decided as if every layer were recomputed, then one way for
  the layers of each place within what is left.
- `actions first`: what layers do is decided as if no state took the link, all of them streamed;
  then where their states lie.
- `states alone`, `all streamed`, `resident`: every layer recomputed; every layer's states in host
  memory; none there.
- `ProTrain`: a block is kept, recomputed or swapped as a whole, its states stream or stay, buffers
  keep some (its four numbers, spec P1 to P5).

A cell is a rule's predicted seconds of the layers over those of the joint answer. `host` is the
same budget with half of the host memory that the joint answer takes: time may not fall by it.
"""

import dataclasses
import itertools
import statistics

from benchmarks import placed
from benchmarks.shared.case import from_to, on
from benchmarks.shared.results import Report
from jaxmem._core.database import Database
from jaxmem._planner.placement.layer import RESIDENT, STREAMED, LayerGroup
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, answer, priced

BUDGETS = 12
LEAST = 1.05


def fits(question: PlacementProblem, one: PlacementSolution) -> bool:
    assert question.room is not None
    assert question.host_room is not None
    return one.device_bytes <= question.room and one.host_bytes <= question.host_room


def states_first(question: PlacementProblem) -> PlacementSolution | None:
    first = answer(dataclasses.replace(question, ways=question.ways[:1]))
    if first is None:
        return None
    found = []
    for ways in itertools.product(range(len(question.ways)), repeat=len(first.counts)):
        counts: dict[LayerGroup, int] = {}
        for (kind, n), way in zip(first.counts.items(), ways):
            counts[LayerGroup(kind.place, way)] = n
        found.append(priced(question, counts, first.outer))
    found = [one for one in found if fits(question, one)]
    return min(found, key=lambda one: one.cautious_seconds, default=None)


def actions_first(question: PlacementProblem) -> PlacementSolution | None:
    layers = question.states.layers
    alone = [
        (way.seconds, w)
        for w, way in enumerate(question.ways)
        for one in [priced(question, {LayerGroup(STREAMED, w): layers}, "pinned_host")]
        if fits(question, one)
    ]
    if not alone:
        return None
    _, fastest = min(alone)
    return answer(dataclasses.replace(question, ways=(question.ways[fastest],)))


def rules(
    simpler: dict[str, PlacementProblem], question: PlacementProblem
) -> dict[str, PlacementSolution | None]:
    """simpler: the questions of `placed.rules`, for any room."""
    within = lambda name: answer(
        dataclasses.replace(simpler[name], room=question.room, host_room=question.host_room)
    )
    return {
        "states first": states_first(question),
        "actions first": actions_first(question),
        "states alone": within("states alone"),
        "all streamed": within("all streamed"),
        "resident": answer(dataclasses.replace(question, places=(RESIDENT,))),
        "ProTrain": within("blocks whole"),
    }


def rooms(question: PlacementProblem, usable: int) -> list[int]:
    least = answer(dataclasses.replace(question, room=None), "bytes")
    most = answer(dataclasses.replace(question, room=None))
    assert least is not None
    assert most is not None
    return from_to(int(LEAST * least.device_bytes), min(most.device_bytes, usable), BUDGETS)


def at(question: PlacementProblem, simpler: dict[str, PlacementProblem]) -> dict:
    """The joint answer, and the seconds of the others over its own."""
    joint = answer(question)
    assert joint is not None
    with_less = answer(dataclasses.replace(question, host_room=joint.host_bytes // 2))
    ratio = lambda one: None if one is None else one.seconds / joint.seconds
    return {
        "room": question.room,
        "states": str(joint.places),
        "seconds": joint.seconds,
        "solve seconds": joint.solve_seconds,
        "host": ratio(with_less),
        "rules": {name: ratio(one) for name, one in rules(simpler, question).items()},
    }


def run(report: Report, model: str, target: str) -> None:
    if report.has(key := f"{model}, {target}"):
        return
    with on(target, Database()) as backend:
        search = placed.search_of(model, backend)
        simpler, question = placed.rules(search), search.question
        sizes = rooms(question, backend.target.usable_bytes)
        rows = [at(dataclasses.replace(question, room=room), simpler) for room in sizes]
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
