"""Models as they are, planned by `jaxmem.auto`: whether a plan is found, and its tags against tags
by hand.

    python -m benchmarks.foreign [RESULT ...]

`foreign`: models that do not import jaxmem, unchanged. Each model's whole training step goes to
`jaxmem.plan(jaxmem.auto(step), ...)`, for this CPU and for an H200, at 0.9, 0.6 and 0.4 of the
bytes of the step as it is, and at 0.97 of the bytes of full recomputation: every layer under
`jax.checkpoint` with nothing saved. If no plan is found, `floor` is the least that the planner
compiled. `layers_under_checkpoints` counts a plan's layers that are not kept as the user wrote
them: if it is 1, a larger plan keeps everything. On the CPU each plan's step is run from the same
parameters as the user's step. The parameters are perturbed so that no gradient is zero: `loss` and
`update` are the largest relative differences of the loss and of any parameter's gradient. They show
rounding alone where the plan stores nothing in a codec, `lossless`.

`auto_tags`: tags that `jaxmem.auto` finds against tags that an engineer wrote, at the same budgets.
A config's step is planned twice for an H200: with its own tags, and by `jaxmem.auto` with every tag
and checkpoint taken out of its model. Eight budgets divide the range from the least that the tagged
step compiles to up to the bytes of the step without a checkpoint, without its ends. `ratio` is the
plan's time under auto over the time with tags, both XLA's estimate of the whole compiled step. The
first plan of each is made from nothing, and the two take turns in going first: `seconds` is the
time of planning.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.shared.case import Step, between, on
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.steps import MODELS, SIZES, shapes, step_of
from experiments.command.load import load
from experiments.steps.step import abstract, make_step, step_over
from jaxmem._core.actions import KEEP, REST, keeps_everything
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import LABEL
from jaxmem._model.auto.step import planned_step
from jaxmem._planner.search.compile import StepCompiler
from tests.shared.foreign import plain

SHARES = (0.9, 0.6, 0.4)
OF_RECOMPUTATION = 0.97
ON_A_MESH = {"FSDP and tensor parallel on 8 devices": plain.on_a_mesh_of_eight}
EIGHT = "h200:8"
NOISE = 1e-4  # of the largest gradient: one below it is rounding


def ends(step: Callable, planned: Step) -> dict:
    """Bytes of the step as it is, and under full recomputation."""
    build = lambda plan: planned_step(step, Assignment.nothing())
    (full,) = StepCompiler(build, planned.args, planned.backend).compile({})
    baseline = planned.plan(10**15).baseline_bytes
    return {"baseline": baseline, "recomputed": full.compiled.total_bytes}


def farthest(got, want, start) -> float:
    """The largest difference of two trees, relative to how far each leaf moved from `start`. A leaf
    whose gradient is nothing but rounding, as that of a key's bias is, is compared with the leaf
    that moved most.
    """
    leaves = list(zip(*map(jax.tree.leaves, (got, want, start)), strict=True))
    moved = [float(jnp.abs(b - p).max()) for _, b, p in leaves]
    assert min(moved) > 0, "a gradient is zero: nothing is compared"
    size = [one if one > NOISE * max(moved) else max(moved) for one in moved]
    return max(float(jnp.abs(a - b).max()) / m for (a, b, _), m in zip(leaves, size, strict=True))


def under_checkpoints(plan) -> int | None:
    """How many layers are; None where a block is not divided into groups of layers."""
    matches = [LABEL.fullmatch(b) for b, tags in plan.actions.items() if tags.get(REST) != KEEP]
    if not all(matches):
        return None
    return sum(int(m["stop"]) - int(m["start"]) for m in matches if m)


def at(step: Step, budget: int, args: tuple, own=None) -> dict:
    """What became of one budget. `own` is what the user's step returns, where it was run."""
    plan, row = step.attempt(budget)
    if plan is None:
        return row | {"floor": row["least"]}
    choices = [choice for tags in plan.actions.values() for choice in tags.values()]
    row |= {
        "share_of_baseline": plan.compiled_bytes / plan.baseline_bytes,
        "time": plan.predicted_seconds / plan.baseline_seconds,
        "layers_under_checkpoints": under_checkpoints(plan),
        "tags": len(choices),
        "lossless": not any(c.action.compresses and c.codec != "bit_mask()" for c in choices),
    }
    if own is not None:
        moved, value = plan.step(jax.tree.map(jnp.copy, args[0]), *args[1:])
        row["loss"] = abs(float(value) / float(own[1]) - 1)
        row["update"] = farthest(moved, own[0], args[0])
    return row


def run(report: Report, name: str, target: str) -> None:
    loss, params, rest = (MODELS | ON_A_MESH)[name](SIZES[target])
    args, step, key = (params, *rest), step_of(loss), f"{name}, {target}"
    own = jax.jit(step)(*args) if target == "local" else None
    with on(target) as backend:
        planned = Step(jaxmem.auto(step), shapes(args), backend)
        sizes = report.once(key, ends, step, planned)
        budgets = {f"{share}": int(share * sizes["baseline"]) for share in SHARES}
        budgets["recomputed"] = int(OF_RECOMPUTATION * sizes["recomputed"])
        for label, budget in budgets.items():
            report.once(f"{key}, {label}", at, planned, budget, args, own)


def summary(report: Report) -> dict:
    rows = {k: r for k, r in report.results.items() if "found" in r}
    found = [r for r in rows.values() if r["found"]]
    # A step that recomputes everything as it is has little left to give.
    least = lambda key: int(OF_RECOMPUTATION * report[key.rpartition(", ")[0]]["recomputed"])
    possible = [r for k, r in rows.items() if r["budget"] >= least(k)]
    ran = [r for r in found if "update" in r]
    exact = [r["update"] for r in ran if r["lossless"]]
    high = {k: r for k, r in rows.items() if k.endswith("h200, 0.9") and r["found"]}
    unused = {k: r for k, r in high.items() if r["share_of_budget"] < 0.85}
    names = "share_of_budget", "layers_under_checkpoints"
    return {
        "models": len(MODELS | ON_A_MESH),
        "budgets": len(rows),
        "found": len(found),
        "within": sum(r["within"] for r in found),
        "not below 0.97 of full recomputation": len(possible),
        "found of these": sum(r["found"] for r in possible),
        "not found": {k: r["floor"] / r["budget"] for k, r in rows.items() if not r["found"]},
        "largest difference of the loss": max((r["loss"] for r in ran), default=None),
        "largest difference of a gradient, lossless": max(exact, default=0),
        "lossless of those run": f"{len(exact)} of {len(ran)}",
        "plans for h200 at 0.9": len(high),
        "use 85 % of it at least": len(high) - len(unused),
        "use less": {k: [r[name] for name in names] for k, r in unused.items()},
        "median of the solvers' seconds in a search": statistics.median(
            r["solve_seconds"] for r in found
        ),
    }


# -- auto_tags

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
        with same, mock.patch.object(jaxmem.ops, "softmax", soft):
            return step(*args)

    return plain


def with_tags(step: Step, budget: int) -> dict:
    """What becomes of a budget, with XLA's seconds of the whole step under the plan."""
    plan, row = step.attempt(budget)
    if plan is None:
        return row
    under = None if keeps_everything(plan.actions) else plan.actions
    whole = step.compile_fully(under).result()
    assert whole.xla_seconds is not None
    tags = sum(len(tags) for tags in plan.actions.values())
    return row | {"xla_seconds": whole.xla_seconds, "tags": tags}


def both(steps: dict[str, Step], budget: int) -> dict:
    rows = {way: with_tags(step, budget) for way, step in steps.items()}
    found = all(row["found"] for row in rows.values())
    ratio = rows["auto"]["xla_seconds"] / rows["tags"]["xla_seconds"] if found else None
    return {"budget": budget, "ratio": ratio} | rows


def ends_of_tags(steps: dict[str, Step]) -> dict:
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


def compare(report: Report, name: str) -> None:
    config = load(name, OVERRIDES)
    builds = {
        "tags": functools.partial(make_step, config),
        "auto": jaxmem.auto(untagged(config)),
    }
    with on(TARGET) as backend:
        steps = {way: Step(build, abstract(config), backend) for way, build in builds.items()}
        low, high = report.once(f"{name} ends", ends_of_tags, steps).values()
        for label, budget in between(low, high, BUDGETS).items():
            report.once(f"{name} {label.partition('/')[0]}", both, steps, budget)
        if name == CONFIGS[0]:
            report.once(f"{name} from nothing", from_nothing, steps, (low + high) // 2)


def summary_of_tags(report: Report) -> dict:
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


CASES = [(name, target) for name in MODELS for target in ("local", "h200")]
RESULTS = {
    "foreign": Benchmark([*CASES, *((name, EIGHT) for name in ON_A_MESH)], run, summary),
    "auto_tags": Benchmark(CONFIGS, compare, summary_of_tags),
}

if __name__ == "__main__":
    measure("foreign", RESULTS)
