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
from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.steps.step import abstract, make_step, step_over
from jaxmem._core.actions import keeps_everything
from jaxmem._core.assignment import Assignment
from jaxmem._target.compile.backend import Deviceless
from jaxmem._target.devices.target import Target
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


def builds(config) -> dict[str, Callable]:
    return {
        "tags": functools.partial(make_step, config),
        "auto": jaxmem.auto(untagged(config)),
    }


def estimate(build: Callable, args: tuple, actions) -> float:
    """XLA's seconds of the step under a plan's actions."""
    plan = None if keeps_everything(actions) else Assignment(actions)
    with Deviceless(Target.parse(TARGET)) as backend:
        seconds = backend.compile(*trace(build, plan, args)).result().xla_seconds
    assert seconds is not None
    return seconds


def at(build: Callable, args: tuple, budget: int) -> dict:
    start = time.perf_counter()
    try:
        plan = jaxmem.plan(build, *args, budget=budget, target=TARGET)
    except jaxmem.errors.BudgetError as error:
        return {"found": False, "least": error.least_bytes}
    seconds = time.perf_counter() - start
    return {
        "found": True,
        "seconds": seconds,
        "compiles": plan.compiles,
        "solve_seconds": plan.solve_seconds,
        "share_of_budget": plan.compiled_bytes / budget,
        "xla_seconds": estimate(build, args, plan.actions),
        "tags": sum(len(tags) for tags in plan.actions.values()),
    }


def ends(config, args: tuple) -> dict:
    tagged = builds(config)["tags"]
    whole = jaxmem.plan(builds(config)["auto"], *args, budget=10**15, target=TARGET)
    # The arguments alone: with less, nothing would be compiled.
    none = 1 + int(whole.baseline_parts.arguments / 0.98)
    try:
        jaxmem.plan(tagged, *args, budget=none, target=TARGET)
    except jaxmem.errors.BudgetError as error:
        return {"least": error.least_bytes, "everything": whole.baseline_bytes}
    raise AssertionError("the arguments' bytes were enough for the step")


def from_nothing(config, args: tuple, budget: int) -> dict:
    """Seconds of the first plan of each, in a cache folder of its own, the best of two turns."""
    found: dict[str, list[float]] = {"tags": [], "auto": []}
    for names in (("tags", "auto"), ("auto", "tags")):
        for name in names:
            cache = tempfile.TemporaryDirectory()
            with cache as folder, mock.patch.dict("os.environ", XDG_CACHE_HOME=folder):
                start = time.perf_counter()
                jaxmem.plan(builds(config)[name], *args, budget=budget, target=TARGET)
                found[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in found.items()}


def run(report: Report, name: str) -> None:
    config = load(name, OVERRIDES)
    args = abstract(config)
    if not report.has(f"{name} ends"):
        report.add(f"{name} ends", ends(config, args))
    e = report[f"{name} ends"]
    for i in range(1, BUDGETS + 1):
        budget = e["least"] + (e["everything"] - e["least"]) * i // (BUDGETS + 1)
        if not report.has(f"{name} {i}"):
            rows = {way: at(build, args, budget) for way, build in builds(config).items()}
            both = all(row["found"] for row in rows.values())
            ratio = rows["auto"]["xla_seconds"] / rows["tags"]["xla_seconds"] if both else None
            report.add(f"{name} {i}", {"budget": budget, "ratio": ratio} | rows)
    if name == CONFIGS[0] and not report.has(f"{name} from nothing"):
        middle = (e["least"] + e["everything"]) // 2
        report.add(f"{name} from nothing", from_nothing(config, args, middle))


def summary(report: Report) -> dict:
    rows = {k: r for k, r in report.results.items() if "ratio" in r}
    ratios = [r["ratio"] for r in rows.values() if r["ratio"] is not None]
    times = next((r for k, r in report.results.items() if k.endswith("from nothing")), None)
    return {
        "budgets": len(rows),
        "found under auto": sum(r["auto"]["found"] for r in rows.values()),
        "found with tags": sum(r["tags"]["found"] for r in rows.values()),
        "largest ratio": max(ratios, default=None),
        "geometric mean": statistics.geometric_mean(ratios) if ratios else None,
        "seconds of the first plan, auto over tags": times and times["auto"] / times["tags"],
        "median solve under auto": statistics.median(
            r["auto"]["solve_seconds"] for r in rows.values() if r["auto"]["found"]
        ),
    }


def main() -> None:
    Report("auto_tags").for_each(CONFIGS, run, summary)


if __name__ == "__main__":
    main()
