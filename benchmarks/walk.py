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

import random
import statistics
import warnings

import jaxmem
from benchmarks.foreign import MODELS
from benchmarks.shared.case import AnyTimes
from benchmarks.shared.results import Report
from benchmarks.shared.steps import SIZES, shapes, step_of
from jaxmem._core.actions import ALL, RECOMPUTE, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._planner.search.estimates import Estimates
from jaxmem._planner.solve.problem import Problem
from jaxmem._target.compile.backend import Deviceless, Local
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem._target.devices.target import Target

TARGETS = ("local", "h200")
LOOPS = ("scan", "microbatches", "names twice", "mixture", "encoder", "recurrent")
RANDOM = 2


def assignments(made: Profile) -> dict[str, Actions]:
    """By name; the step as it is first."""
    found = {"as it is": made.everything_kept, "recomputed": {b.name: {} for b in made.blocks}}
    rng = random.Random(0)
    for i in range(RANDOM):
        actions: Actions = {b.name: {} for b in made.blocks}
        for (block, tag), choices in Problem(made).open_choices().items():
            actions[block][tag] = rng.choice(choices) if rng.random() < 0.5 else RECOMPUTE
        found[f"random {i}"] = actions
    return found


def run(report: Report, name: str, backend: Backend) -> None:
    target = backend.target
    loss, params, rest = MODELS[name](SIZES[target.name])
    args = shapes((params, *rest))
    steps = StepCompiler(jaxmem.auto(step_of(loss)), args, backend)
    here = [a for a in allowed_actions(ALL, target)[0] if not a.offloads]
    jaxpr = steps.trace(Assignment.nothing()).jaxpr
    made = profile(jaxpr, backend, Allowed(here), database=backend.database)
    steps.idle_blocks = made.idle_blocks
    walks = Estimates(steps, made)
    key = lambda which: f"{name}, {target.name}, {which}"
    todo = {k: a for k, a in assignments(made).items() if not report.has(key(k))}
    for which, actions in todo.items():
        (step,) = steps.attempt(actions)
        if not isinstance(step, CompiledStep):
            continue
        told = walks.temporary_bytes(actions) + step.compiled.argument_bytes
        total = step.compiled.total_bytes
        row = {"walked": told, "compiled": total, "error": told / total - 1}
        report.add(key(which), row | {"loop": any(word in name for word in LOOPS)})


def of_errors(rows: list[dict]) -> dict:
    errors = sorted(abs(r["error"]) for r in rows)
    return {
        "points": len(rows),
        "median error": statistics.median(errors),
        "90 % are within": errors[int(0.9 * (len(errors) - 1))],
        "worst": errors[-1],
        "median, with its sign": statistics.median(r["error"] for r in rows),
    }


def summary(report: Report) -> dict:
    rows = report.results
    chosen = lambda target, loop: [
        r for k, r in rows.items() if f", {target}, " in k and r["loop"] == loop
    ]
    ways = {True: "a loop over layers", False: "a Python loop"}
    return {
        f"{target}, {ways[loop]}": of_errors(chosen(target, loop))
        for target in TARGETS
        for loop in (True, False)
    }


def main() -> None:
    report = Report("walk")
    warnings.simplefilter("ignore")
    database = AnyTimes()
    for name in MODELS:
        with Local(Target.parse("local"), database) as backend:
            run(report, name, backend)
        with Deviceless(Target.parse("h200"), database) as backend:
            run(report, name, backend)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()
