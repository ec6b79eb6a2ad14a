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
import warnings
from typing import Any

from benchmarks import placed, streamed_bytes
from benchmarks.shared.results import Report
from jaxmem._core.database import Database
from jaxmem._planner.placement.layer import RESIDENT, STREAMED, Kind
from jaxmem._planner.placement.program import Answer, Question, answer, priced
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target

BUDGETS = 12
LEAST = 1.05


def fits(question: Question, one: Answer) -> bool:
    assert question.room is not None
    assert question.host_room is not None
    return one.device_bytes <= question.room and one.host_bytes <= question.host_room


def states_first(question: Question) -> Answer | None:
    first = answer(dataclasses.replace(question, ways=question.ways[:1]))
    if first is None:
        return None
    found = []
    for ways in itertools.product(range(len(question.ways)), repeat=len(first.counts)):
        counts: dict[Kind, int] = {}
        for (kind, n), way in zip(first.counts.items(), ways):
            counts[Kind(kind.place, way)] = n
        found.append(priced(question, counts, first.outer))
    found = [one for one in found if fits(question, one)]
    return min(found, key=lambda one: one.cautious_seconds, default=None)


def actions_first(question: Question) -> Answer | None:
    layers = question.states.layers
    alone = [
        (way.seconds, w)
        for w, way in enumerate(question.ways)
        for one in [priced(question, {Kind(STREAMED, w): layers}, "pinned_host")]
        if fits(question, one)
    ]
    if not alone:
        return None
    _, fastest = min(alone)
    return answer(dataclasses.replace(question, ways=(question.ways[fastest],)))


def rules(simpler: dict[str, Question], question: Question) -> dict[str, Answer | None]:
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


def rooms(question: Question, usable: int) -> list[int]:
    least = answer(dataclasses.replace(question, room=None), "bytes")
    most = answer(dataclasses.replace(question, room=None))
    assert least is not None
    assert most is not None
    low, high = int(LEAST * least.device_bytes), min(most.device_bytes, usable)
    return [low + (high - low) * i // (BUDGETS - 1) for i in range(BUDGETS)]


def run(report: Report, model: str, target: str, backend) -> None:
    if report.has(key := f"{model}, {target}"):
        return
    asked = placed.asked_of(model, backend)
    simpler, rows = placed.rules(asked), []
    for room in rooms(asked.search.question, backend.target.usable_bytes):
        question = dataclasses.replace(asked.search.question, room=room)
        joint = answer(question)
        assert joint is not None
        found = rules(simpler, question)
        less = dataclasses.replace(question, host_room=joint.host_bytes // 2)
        with_less = answer(less)
        row: dict[str, Any] = {
            "room": room,
            "states": str(joint.places),
            "seconds": joint.seconds,
            "solve seconds": joint.solve_seconds,
            "host": None if with_less is None else with_less.seconds / joint.seconds,
        }
        row["rules"] = {
            name: None if one is None else one.seconds / joint.seconds
            for name, one in found.items()
        }
        rows.append(row)
    report.add(key, {"budgets": rows})


def summary(report: Report) -> dict:
    rows = [row for found in report.results.values() for row in found["budgets"]]
    solves = sorted(row["solve seconds"] for row in rows)
    told: dict[str, Any] = {"budgets": len(rows), "median solve seconds": statistics.median(solves)}
    told["most solve seconds"] = solves[-1]
    times = [[r["seconds"] for r in found["budgets"]] for found in report.results.values()]
    told["rises with the budget"] = sum(
        b > a * (1 + 1e-6) for one in times for a, b in itertools.pairwise(one)
    )
    told["falls with less host memory"] = sum(
        row["host"] is not None and row["host"] < 1 - 1e-6 for row in rows
    )
    for rule in rows[0]["rules"]:
        ratios = [row["rules"][rule] for row in rows if row["rules"][rule] is not None]
        told[rule] = {
            "found": len(ratios),
            "times as long": statistics.geometric_mean(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    return told


def main() -> None:
    report = Report("placed_rules")
    warnings.simplefilter("ignore")
    for model, target in itertools.product(streamed_bytes.MODELS, placed.TARGETS):
        with backend_for(Target.parse(target), Database()) as backend:
            run(report, model, target, backend)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()
