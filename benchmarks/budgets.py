"""Plans over a range of budgets: whether a plan is found, its bytes, and how well they were
predicted, for our models and for models as they are; the least bytes; how long planning takes; and
the tags of `jaxmem.auto` against tags by hand.

    python -m benchmarks.budgets [RESULT ...]

The range is from the least bytes that compiled (the refusal of a budget that is too small names
them) to a largest budget. The budgets divide the range evenly, without its ends. Deviceless, the
planner leaves 2 % of a budget free. `compiles` counts all requested compiles, recalled ones
included. Times are the planner's; no step runs on a GPU or a TPU.

`budgets`: up to keep-all, which keeps every tag and recomputes the rest. Three more budgets:
keep-all itself, halfway from there to everything kept, and everything kept with the planner's
margin. Every second budget is planned from nothing; the others use earlier searches' compiles, as
any later plan of a step does.

`tpu_budgets`: up to everything kept, for TPUs without hardware. A budget beyond the device's memory
is replaced by the device's memory. Random bits are rbg's, as is common on TPUs. `llama_1b` is a
Llama of a billion parameters with two sequences of 1024 tokens for each device. Parameters, moments
and sequences are divided over all devices (FSDP).

`least`: does the least that a search finds depend on luck? A budget one byte above the arguments is
requested, which no plan meets: ten times from nothing, with another seed for the descent each time,
and three times more after another budget was planned, with the compiles of all searches before.
`spread` is the largest of these least bytes over the smallest, less 1. The results also hold the
bytes of full recomputation.

`plan_seconds`: the time of planning gpt_345m in a new process, with no time database and no
remembered compile. The seconds depend on the machine's other work, so the load is listed too.

`foreign`: models that do not import jaxmem, unchanged. Each model's whole training step goes to
`jaxmem.plan(jaxmem.auto(step), ...)`, for this CPU and for an H200, at 0.9, 0.6 and 0.4 of the
bytes of the step as it is, and at 0.97 of the bytes of full recomputation: every layer under
`jax.checkpoint` with nothing saved. If no plan is found, `floor` is the least that the planner
compiled. On the CPU each plan's step is run from the same parameters as the user's step. The
parameters are perturbed so that no gradient is zero: `loss` and `update` are the largest relative
differences of the loss and of any parameter's gradient. They show rounding alone where the plan
stores nothing in a codec, `lossless`.

`long_context`: the least bytes of a GPT of 96 layers with 4 sequences of 32768 tokens, for an H200,
with and without layers in spans, by the refusal of a budget 5 % above the arguments. Then a
plan for half of the least bytes without spans, and its time and the time of full recomputation
without spans, both XLA's estimates of whole steps. `device` allows keep and recompute; `codecs`
allows compress too. Each is planned from nothing.

`auto_tags`: tags that `jaxmem.auto` finds against tags that an engineer wrote, at the same budgets.
A config's step is planned twice for an H200: with its own tags, and by `jaxmem.auto` with every tag
and checkpoint taken out of its model. Eight budgets divide the range from the least that the tagged
step compiles to up to the bytes of the step without a checkpoint, without its ends. `ratio` is the
plan's time under auto over the time with tags, both XLA's estimate of the whole compiled step. The
first plan of each is made from nothing, and the two take turns in going first: `seconds` is the
time of planning.
"""

import os
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.shared import long_context
from benchmarks.shared.assignments import is_lossless, keep_tags
from benchmarks.shared.case import SCANNED, Case, Step, case_on, on, plain_loop, random_bits_for
from benchmarks.shared.devices import fsdp
from benchmarks.shared.released import LONG
from benchmarks.shared.results import Benchmark, Report, found_of, known, measure, timed
from benchmarks.shared.searches import NO_HISTORY, between, of_rows, own_cache, printed, replacing
from benchmarks.shared.steps import MODELS, SIZES, of_config, of_model, shapes, step_of
from experiments.command.load import load
from experiments.steps.step import step_over
from jaxmem._core.assignment import Assignment
from jaxmem._planner.search import local_search, spans
from tests.shared.foreign import libraries, plain
from tests.shared.foreign.size import Size

GPTS = (("gpt_nano", "local"), ("gpt_117m", "h200"), ("gpt_345m", "h200"))
BETWEEN = 8
# -- budgets

ODD = "1357"


def ends(case: Case) -> dict:
    """Bytes of the least that compiled, of every tag kept, and of everything kept."""
    (keep_all,) = case.compile_buffers(keep_tags(case.profile))
    return case.ends() | {"keep_all": keep_all.total}


def of_gpt(report: Report, config: str, target: str) -> None:
    name = f"{config} {target}"
    with case_on(target, config) as case:
        e = report.once(f"{name} ends", ends, case)
        divided = between(e["least"], e["keep_all"], BETWEEN)
        # In the order in which they are planned: what is not from nothing recalls those before it.
        budgets = {"everything": case.budget_for(e["everything"])}
        budgets |= {label: budget for label, budget in divided.items() if label[0] not in ODD}
        budgets |= {"keep_all": e["keep_all"]} | divided
        budgets["above"] = (e["keep_all"] + e["everything"]) // 2
        for label, budget in budgets.items():
            with replacing(*[NO_HISTORY] * (label[0] in ODD)):
                report.once(f"{name} {label}", case.row, budget)


def summary_of_gpt(report: Report, name: str) -> dict:
    rows = report.under(f"{name} ")
    ends = rows.pop("ends")
    inside = [r for r in rows.values() if ends["least"] < r["budget"] < ends["keep_all"]]
    of_all = of_rows(rows.values())
    whole = {key: of_all[key] for key in ("budgets", "most compiles")}
    return of_rows(inside) | whole | {"within the budget": of_all["within"]}


# -- tpu_budgets

LLAMA = (
    *LONG, "model.layers=16", "model.width=2048", "model.hidden=5632", "model.heads=16",
    "model.kv_heads=16", "model.vocab=32768", "model.tied=true", "model.attention=fused",
)  # fmt: skip
VIT = Size(width=768, heads=12, layers=12, batch=64, sequence=224, vocab=1000)
TPU_CASES = (
    *(f"{name} {target}" for name in ("gpt_117m", "gpt_345m") for target in ("v5e", "v5p", "v6e")),
    *(f"llama_1b {target}" for target in ("v5e:4x4", "v5p:2x2x4", "v6e:4x4")),
    *(f"vit {target}" for target in ("v5e", "v5p", "v6e")),
)


def step_for(name: str, devices: int) -> tuple[Callable, tuple]:
    """(`build`, its arguments' shapes)."""
    if name == "llama_1b":
        return fsdp(load("llama_nano", [*LLAMA, f"train.batch={2 * devices}"]), devices)
    return of_model(libraries.vit, VIT) if name == "vit" else of_config(name)


def of_tpu(report: Report, key: str) -> None:
    name, target = key.split()
    random_bits_for(target)
    with on(target) as backend:
        step = Step(*step_for(name, backend.target.devices), backend)
        e, most = report.once(f"{key} ends", step.ends), backend.target.usable_bytes
        budgets = between(e["least"], e["everything"], BETWEEN)
        capped = {label: min(budget, most) for label, budget in budgets.items()}
        report.once_each(f"{key} ", capped, step.row)


def summary_of_tpu(report: Report, key: str) -> dict:
    return of_rows(r for k, r in report.under(f"{key} ").items() if k != "ends")


# -- least

SEEDS = range(10)
HISTORIES = (0.9, 0.6, 0.4)  # shares of the bytes of everything kept, planned for in turn


def refusal(case: Case, arguments: int, before: int | None = None) -> dict:
    """The least that a search names, after the plan for a budget `before`."""
    if before is not None:
        case.plan(before)
    return {"least": case.least(arguments)}


def of_luck(report: Report, config: str, target: str) -> None:
    name = f"{config} {target}"
    with case_on(target, config) as case:
        steps = case.compile_buffers(None, case.profile.everything_recomputed)
        sizes = [step.compiled.total_bytes for step in steps]
        arguments = steps[0].compiled.argument_bytes
        report.once(f"{name} ends", lambda: dict(zip(("everything", "recomputed"), sizes)))
        for seed in SEEDS:
            with replacing(NO_HISTORY, (local_search, "SEED", seed)):
                report.once(f"{name} seed {seed}", refusal, case, arguments)
        for share in HISTORIES:
            report.once(f"{name} after {share}", refusal, case, arguments, int(share * sizes[0]))


def summary_of_luck(report: Report, name: str) -> dict:
    found = [r["least"] for r in report.under(f"{name} ").values() if "least" in r]
    return {
        "searches": len(found),
        "spread": max(found) / min(found) - 1,
        "of full recomputation, at most": max(found) / report[f"{name} ends"]["recomputed"],
    }


# -- plan_seconds

GOALS = {("h200", "16GiB"): 120, ("v5e", "12GiB"): 180}  # seconds
CHILD = """
import json, sys
from benchmarks.shared.case import random_bits_for
from experiments.command.load import load
from experiments.running.planning import new_plan
random_bits_for(sys.argv[2])
plan = new_plan(load("gpt_345m", ["plan.budget=" + sys.argv[1], "plan.target=" + sys.argv[2]]))
print(json.dumps({"compiles": plan.compiles, "compiled_bytes": plan.compiled_bytes}))
"""


def from_nothing(target: str, budget: str) -> dict:
    with own_cache():
        found, seconds = timed(printed, CHILD, budget, target, JAX_COMPILATION_CACHE_DIR="")
    machine = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    return found | {"process_seconds": seconds} | machine


def of_seconds(report: Report) -> dict:
    found = {}
    for (target, budget), goal in GOALS.items():
        seconds = report[f"{target} {budget}"]["process_seconds"]
        found[target] = {"seconds": seconds, "reached": seconds <= goal}
    return found


# -- foreign

SHARES = (0.9, 0.6, 0.4)
OF_RECOMPUTATION = 0.97
ON_A_MESH = {"FSDP and tensor parallel on 8 devices": plain.on_a_mesh_of_eight}
EIGHT = "h200:8"
NOISE = 1e-4  # of the largest gradient: one below it is rounding


def ends_of_model(step: Step) -> dict:
    """Bytes of the step as it is, and under full recomputation."""
    recomputed = step.compile_fully(Assignment.nothing()).result().total_bytes
    return {"baseline": step.whole_plan().baseline_bytes, "recomputed": recomputed}


def farthest(got, want, start) -> float:
    """Returns the largest difference of two trees, relative to the change of each leaf from
    `start`. The difference of a leaf whose gradient is only rounding error, such as a key's bias,
    is relative to the largest change of any leaf.
    """
    leaves = list(zip(*map(jax.tree.leaves, (got, want, start)), strict=True))
    moved = [float(jnp.abs(b - p).max()) for _, b, p in leaves]
    assert min(moved) > 0, "a gradient is zero: nothing is compared"
    size = [one if one > NOISE * max(moved) else max(moved) for one in moved]
    return max(float(jnp.abs(a - b).max()) / m for (a, b, _), m in zip(leaves, size, strict=True))


def at_budget(step: Step, args: tuple, own, budget: int) -> dict:
    """What became of one budget. `own` is what the user's step returns, where it was run."""
    plan, row = step.attempt(budget)
    if plan is None:
        return row | {"floor": row["least"]}
    row["lossless"] = is_lossless(plan.actions)
    if own is not None:
        moved, value = plan.step(jax.tree.map(jnp.copy, args[0]), *args[1:])
        row["loss"] = abs(float(value) / float(own[1]) - 1)
        row["update"] = farthest(moved, own[0], args[0])
    return row


def of_foreign(report: Report, name: str, target: str) -> None:
    loss, params, rest = (MODELS | ON_A_MESH)[name](SIZES[target])
    args, step, key = (params, *rest), step_of(loss), f"{name}, {target}"
    own = jax.jit(step)(*args) if target == "local" else None
    with on(target) as backend:
        planned = Step(jaxmem.auto(step), shapes(args), backend)
        sizes = report.once(key, ends_of_model, planned)
        budgets = {f"{share}": int(share * sizes["baseline"]) for share in SHARES}
        budgets["recomputed"] = int(OF_RECOMPUTATION * sizes["recomputed"])
        report.once_each(f"{key}, ", budgets, at_budget, planned, args, own)


def summary_of_models(report: Report) -> dict:
    rows = {k: r for k, r in report.results.items() if "found" in r}
    found, counts = found_of(rows.values())
    # A step that recomputes everything as it is has little left to give.
    least = lambda key: int(OF_RECOMPUTATION * report[key.rpartition(", ")[0]]["recomputed"])
    possible = [r for k, r in rows.items() if r["budget"] >= least(k)]
    ran = [r for r in found if "update" in r]
    exact = [r["update"] for r in ran if r["lossless"]]
    high = [r for k, r in rows.items() if k.endswith("h200, 0.9") and r["found"]]
    return counts | {
        "models": len(MODELS | ON_A_MESH),
        "not below 0.97 of full recomputation": len(possible),
        "found of these": sum(r["found"] for r in possible),
        "largest difference of the loss": max((r["loss"] for r in ran), default=None),
        "largest difference of a gradient, lossless": max(exact, default=0),
        "plans for h200 at 0.9": len(high),
        "use 85 % of it at least": sum(r["share_of_budget"] >= 0.85 for r in high),
    }


# -- auto_tags

CONFIGS = ("gpt_117m", "bert_base", "gpt_345m")
TARGET = "h200"


def untagged(config) -> Callable:
    """The config's step as one would write it without jaxmem."""
    step = step_over(config, plain_loop)

    def plain(*args):
        same = lambda x, *_, **__: x
        soft = lambda x, *_, axis=-1, **__: jax.nn.softmax(x, axis)
        with replacing((jaxmem, "tag", same), (jaxmem.ops, "softmax", soft)):
            return step(*args)

    return plain


def with_tags(step: Step, budget: int) -> dict:
    """What becomes of a budget, with XLA's seconds of the whole step under the plan."""
    plan, row = step.attempt(budget)
    if plan is None:
        return row
    under = None if plan.keeps_everything else Assignment(plan.actions)
    return row | {"xla_seconds": known(step.compile_fully(under).result().xla_seconds)}


def both(steps: dict[str, Step], budget: int) -> dict:
    rows = {way: with_tags(step, budget) for way, step in steps.items()}
    found = all(row["found"] for row in rows.values())
    ratio = rows["auto"]["xla_seconds"] / rows["tags"]["xla_seconds"] if found else None
    return {"budget": budget, "ratio": ratio} | rows


def first_plans(steps: dict[str, Step], budget: int) -> dict:
    """Seconds of the first plan of each, in a cache folder of its own, the best of two turns."""
    found: dict[str, list[float]] = {"tags": [], "auto": []}
    for name in ("tags", "auto", "auto", "tags"):
        with own_cache():
            found[name].append(timed(steps[name].plan, budget)[1])
    return {name: min(seconds) for name, seconds in found.items()}


def without_tags(case: Case) -> Step:
    """The case's step under `jaxmem.auto`, as one would write it without jaxmem."""
    return Step(jaxmem.auto(untagged(case.config)), case.args, case.backend)


def compare(report: Report, name: str) -> None:
    with case_on(TARGET, name, *SCANNED) as case:
        steps = {"tags": case, "auto": without_tags(case)}
        low, high = report.once(f"{name} ends", steps["tags"].ends, steps["auto"]).values()
        for label, budget in between(low, high, BETWEEN).items():
            report.once(f"{name} {label.partition('/')[0]}", both, steps, budget)
        if name == CONFIGS[0]:
            report.once(f"{name} from nothing", first_plans, steps, (low + high) // 2)


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


# -- long_context

OVER = 1.03  # of the arguments' bytes, without the target's margin
SETS = {"device": ("keep", "recompute"), "codecs": ("keep", "recompute", "compress")}


def of_long_context(allowed: str) -> dict:
    args, given = long_context.arguments(), {"actions": SETS[allowed]}
    static = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(args))
    with on(TARGET) as backend:
        step = Step(long_context.build, args, backend)
        with own_cache(), replacing((spans, "spannable", lambda profile: [])):
            without = step.least(int(OVER * static), **given)
        with own_cache():
            with_spans = step.least(int(OVER * static), **given)
        with own_cache():
            half, row = step.attempt(without // 2, **given)
    price = jaxmem.plans.price
    recomputed = price(long_context.build, Assignment.nothing(), *args, target=TARGET)
    return {
        "arguments": static,
        "without spans": without,
        "in spans": with_spans,
        "ratio": with_spans / without,
        "recomputed_bytes": recomputed.compiled_bytes,
        "recomputed_seconds": recomputed.predicted_seconds,
        "half": None if half is None else row,
    }


FOREIGN = [(name, target) for name in MODELS for target in ("local", "h200")]
FOREIGN += [(name, EIGHT) for name in ON_A_MESH]


RESULTS = {
    "budgets": Benchmark(GPTS, of_gpt, of_case=summary_of_gpt),
    "tpu_budgets": Benchmark(TPU_CASES, of_tpu, of_case=summary_of_tpu),
    "least": Benchmark(GPTS, of_luck, of_case=summary_of_luck),
    "plan_seconds": Benchmark(GOALS, row=from_nothing, summary=of_seconds, joint=" "),
    "foreign": Benchmark(FOREIGN, of_foreign, summary_of_models),
    "long_context": Benchmark(SETS, row=of_long_context),
    "auto_tags": Benchmark(CONFIGS, compare, summary_of_tags),
}

if __name__ == "__main__":
    measure("budgets", RESULTS)
