"""Tags that `jaxmem.auto` finds against those that an engineer wrote, over the same budgets.

    python -m benchmarks.auto_tags

A config's step is planned twice for an H200: with its own tags, and with every tag and checkpoint
taken out of its model, by `jaxmem.auto`. Eight budgets divide the range from the least that the
tagged step compiles to up to the bytes of the step without a checkpoint, its ends left out. `ratio`
is the plan's time under auto over that with tags, each XLA's estimate of the whole compiled step.
The first plan of each is made from nothing, and the two take turns in going first: `seconds` is how
long they took.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import jax

import jaxmem
from benchmarks.shared.case import Step, between, on
from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.steps.step import abstract, make_step, step_over
from jaxmem._core.actions import keeps_everything
from jaxmem._core.assignment import Assignment
from jaxmem._trace.step import trace

CONFIGS = ("gpt_117m", "bert_base", "gpt_345m")
BUDGETS = 8
# The released step takes a layer as a function, and its clipping is its own.
OVERRIDES = ("optimizer.accumulation=scan", "optimizer.clip=norm")
TARGET = "h200"


def plain_loop(layer, parameters, x, key, *shared):
    """A scan over the layers without a checkpoint."""
    count = len(jax.tree.leaves(parameters)[0])

    def turn(x, one):
        parameters, index = one
        own = {} if key is None else {"key": jax.random.fold_in(key, index)}
        return layer(parameters, x, *shared, **own), None

    return jax.lax.scan(turn, x, (parameters, jax.numpy.arange(count, dtype="uint32")))[0]


def untagged(config) -> Callable:
    """The config's step as one would write it without jaxmem."""
    step = step_over(config, plain_loop)

    def plain(*args):
        same = mock.patch.object(jaxmem, "tag", lambda x, *_, **__: x)
        soft = lambda x, *_, axis=-1, **__: jax.nn.softmax(x, axis)
        with same, mock.patch.object(jaxmem, "softmax", soft):
            return step(*args)

    return plain


def at(step: Step, budget: int) -> dict:
    """What becomes of a budget, with XLA's seconds of the whole step under the plan."""
    plan, row = step.attempt(budget)
    if plan is None:
        return row
    under = None if keeps_everything(plan.actions) else Assignment(plan.actions)
    whole = step.backend.compile(*trace(step.build, under, step.args)).result()
    assert whole.xla_seconds is not None
    tags = sum(len(tags) for tags in plan.actions.values())
    return row | {"xla_seconds": whole.xla_seconds, "tags": tags}


def both(steps: dict[str, Step], budget: int) -> dict:
    rows = {way: at(step, budget) for way, step in steps.items()}
    found = all(row["found"] for row in rows.values())
    ratio = rows["auto"]["xla_seconds"] / rows["tags"]["xla_seconds"] if found else None
    return {"budget": budget, "ratio": ratio} | rows


def ends(steps: dict[str, Step]) -> dict:
    whole = steps["auto"].plan(10**15)
    least = steps["tags"].least(whole.baseline_parts.arguments)
    return {"least": least, "everything": whole.baseline_bytes}


def from_nothing(steps: dict[str, Step], budget: int) -> dict:
    """Seconds of the first plan of each, in a cache folder of its own, the best of two turns."""
    found: dict[str, list[float]] = {"tags": [], "auto": []}
    for name in ("tags", "auto", "auto", "tags"):
        cache = tempfile.TemporaryDirectory()
        with cache as folder, mock.patch.dict("os.environ", XDG_CACHE_HOME=folder):
            start = time.perf_counter()
            steps[name].plan(budget)
            found[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in found.items()}


def run(report: Report, name: str) -> None:
    config = load(name, OVERRIDES)
    builds = {
        "tags": functools.partial(make_step, config),
        "auto": jaxmem.auto(untagged(config)),
    }
    with on(TARGET) as backend:
        steps = {way: Step(build, abstract(config), backend) for way, build in builds.items()}
        low, high = report.once(f"{name} ends", ends, steps).values()
        for label, budget in between(low, high, BUDGETS).items():
            report.once(f"{name} {label.partition('/')[0]}", both, steps, budget)
        if name == CONFIGS[0]:
            report.once(f"{name} from nothing", from_nothing, steps, (low + high) // 2)


def summary(report: Report) -> dict:
    rows = [r for r in report.results.values() if "ratio" in r]
    found = {way: [r[way] for r in rows if r[way]["found"]] for way in ("auto", "tags")}
    ratios = [r["ratio"] for r in rows if r["ratio"] is not None]
    times = report[f"{CONFIGS[0]} from nothing"]
    return {
        "budgets": len(rows),
        "found under auto": len(found["auto"]),
        "found with tags": len(found["tags"]),
        "largest ratio": max(ratios),
        "geometric mean": statistics.geometric_mean(ratios),
        "seconds of the first plan, auto over tags": times["auto"] / times["tags"],
        "median solve under auto": statistics.median(r["solve_seconds"] for r in found["auto"]),
    }


def main() -> None:
    Report("auto_tags").for_each(CONFIGS, run, summary)


if __name__ == "__main__":
    main()
