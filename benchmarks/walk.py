"""Are bytes right before anything is compiled? Walks through traced steps, beside compiled ones.

    python -m benchmarks.walk

For each model of `benchmarks/foreign.py`, for the CPU at hand and for an H200, under
`jaxmem.auto`: the step as it is, every tag recomputed, and two assignments that are drawn at random
(half of the tags recomputed, the others under any action that is no transfer). `error` is what the
walk says of the whole step on the device against what it compiles to. The walk was written looking
at gpt_nano, gpt_117m and bert_base, and at a part of these models on the CPU; none of its numbers
is fitted to any of them.

`loop` says whether the program loops over its layers: where a Python loop repeats them, XLA fuses
and orders across layers, and less is known.
"""

import itertools
import random

import jaxmem
from benchmarks.foreign import MODELS
from benchmarks.shared.assignments import drawn, recomputed
from benchmarks.shared.case import AnyTimes, Step, on
from benchmarks.shared.results import Report, of_errors
from benchmarks.shared.steps import SIZES, shapes, step_of
from jaxmem._core.actions import ALL, RECOMPUTE, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.estimates import Estimates
from jaxmem._target.devices.support import allowed_actions

TARGETS = ("local", "h200")
LOOPS = ("scan", "microbatches", "names twice", "mixture", "encoder", "recurrent")
RANDOM = 2
DATABASE = AnyTimes()


def assignments(made: Profile) -> dict[str, Actions]:
    """By name; the step as it is first."""
    rng = random.Random(0)
    half = lambda choices: rng.choice(choices) if rng.random() < 0.5 else RECOMPUTE
    return {
        "as it is": made.everything_kept,
        "recomputed": recomputed(made),
        **{f"random {i}": drawn(made, half) for i in range(RANDOM)},
    }


def run(report: Report, name: str, target: str) -> None:
    loss, params, rest = MODELS[name](SIZES[target])
    build, args = jaxmem.auto(step_of(loss)), shapes((params, *rest))
    with on(target, DATABASE) as backend:
        here = [a for a in allowed_actions(ALL, backend.target)[0] if not a.offloads]
        step = Step(build, args, backend, backend.database, here)
        walks = Estimates(step.steps, step.profile)
        for which, actions in assignments(step.profile).items():
            if report.has(key := f"{name}, {target}, {which}"):
                continue
            (found,) = step.steps.try_compile(actions)
            if isinstance(found, CompiledStep):
                told = walks.temporary_bytes(actions) + found.compiled.argument_bytes
                total = found.compiled.total_bytes
                row = {"walked": told, "compiled": total, "error": told / total - 1}
                report.add(key, row | {"loop": any(word in name for word in LOOPS)})


def of_rows(rows: list[dict]) -> dict:
    return {"points": len(rows)} | of_errors(r["error"] for r in rows)


def summary(report: Report) -> dict:
    chosen = lambda target, loop: [
        r for k, r in report.results.items() if f", {target}, " in k and r["loop"] == loop
    ]
    ways = {True: "a loop over layers", False: "a Python loop"}
    cases = itertools.product(TARGETS, ways)
    return {f"{target}, {ways[loop]}": of_rows(chosen(target, loop)) for target, loop in cases}


def main() -> None:
    Report("walk").for_each(itertools.product(MODELS, TARGETS), run, summary)


if __name__ == "__main__":
    main()
