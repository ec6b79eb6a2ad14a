"""Training steps of libraries under plans, against the libraries' own remat policies.

    python -m benchmarks.stacks [RESULT ...]

`stacks`:

Each step is a script of `examples/stacks/` that trains with a real package, if the package is
installed (`make stacks`), or a step in the exact shape of a library, of `tests/shared/shapes/`. The
step as the library jits it goes to `jaxmem.plan(jaxmem.auto(step), ...)` at three budgets, which
divide the range from full recomputation to everything kept, for this CPU, for an H200, and for a
TPU v5e; for the latter two from shapes. On the CPU each lossless plan's step is run: `loss` is its
loss over the library's, and `gradient` the largest difference of a gradient, relative to the
gradient's largest element.

For each of the library's own policies, `policies` has the bytes and XLA's seconds of the step. A
plan is made at the bytes of each policy, and `ratio` is the policy's seconds over the plan's.

`stacks_jit`: the cost of `jaxmem.jit` in the place of a library's own jit, for each script of
`examples/stacks/`. `lines` are the lines of the script's function `planned` that its function `own`
does not have, and the import of jaxmem. `call` is the CPU time of the calling thread from a call to
its return, while the step runs in other threads. `first step` is the time from the first call in a
process to its result, at a budget of 60 % of the bytes of everything kept: under the library's own
jit, under `jaxmem.jit` with nothing stored, and under `jaxmem.jit` with the plan that the process
before stored. The first and the last are the lesser of two processes, which alternate. A second
run in another environment adds the rows of the scripts of that environment.

`jit_first_steps`: the row `first step` of a GPT, of the config gpt_nano without its tags.

`stacks_openpi`: plans of openpi's step at the sizes of PaliGemma 2B and its action expert, compiled
for GPUs of 24, 48 and 80 GB.
"""

import ast
import difflib
import functools
import importlib
import importlib.util
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import examples.stacks
import jaxmem
from benchmarks.budgets import untagged
from benchmarks.shared.case import SCANNED, Step, on
from benchmarks.shared.results import Benchmark, Report, found_of, measure
from benchmarks.shared.searches import between, own_cache, printed
from examples.stacks.openpi_sizes import row_for
from examples.stacks.training import Training, farthest, nbytes, observed
from experiments.command.load import load
from experiments.steps.step import abstract
from jaxmem._core.assignment import Assignment
from jaxmem._trace.signature import Signature
from tests.shared.foreign.size import Size
from tests.shared.shapes.table import SHAPES

SCRIPTS = {
    "equimo": "equimo", "gemma": "kauldron", "levanter": "levanter", "transformers": "transformers",
    "tunix": "tunix",
}  # fmt: skip
SIZE = Size(width=256, heads=8, layers=6, batch=8, sequence=256, vocab=512)
TARGETS = "h200", "v5e", "local"
BUDGETS = 3
CALLS = 10
SOURCES = pathlib.Path(examples.stacks.__path__[0])
SHARE = 0.6  # of the bytes of everything kept, as in the scripts
OWN, NOTHING, STORED = "own", "jaxmem.jit, nothing stored", "jaxmem.jit, a stored plan"
GPT = "gpt_nano"
PROCESSES = [NOTHING, *2 * [OWN, STORED]]


def stack_of(name: str) -> tuple[Callable[..., Training], dict, Callable]:
    """A function of a policy that makes the step, the library's policies, and what takes the place
    of the library's jit. Shapes have a size that is large enough for an H200, in which kernels take
    longer than their launches.
    """
    if name == GPT:
        return gpt, {"none": None}, jaxmem.jit
    if name in SHAPES:
        return functools.partial(SHAPES[name].make, size=SIZE), SHAPES[name].policies, jaxmem.jit
    module = importlib.import_module(f"examples.stacks.{name}")
    return module.training, getattr(module, "POLICIES", {"none": None}), module.planned


def gpt(policy: None = None, jit: Callable = jax.jit) -> Training:
    """A config's step as one would write it without jaxmem."""
    config = load(GPT, SCANNED)
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    arguments = lambda: (zeros(abstract(config)), {})
    read = lambda args, kwargs, result: (result[1]["loss"], result[0].params)
    step = jit(untagged(config), donate_argnums=0)
    return Training(step, arguments, read, zeros(abstract(config)[0].params))


def positional(training: Training) -> tuple[Callable, tuple]:
    """The step as the library jits it, for `jaxmem.plan`, with shapes of its arguments."""
    args, kwargs = training.arguments()
    signature = Signature(training.step, {})
    values, called = signature.positional(args, kwargs)
    return jaxmem.auto(called(training.step)), signature.shapes(values)


def bytes_and_seconds(step: Step) -> dict:
    """Of the step as the library wrote it."""
    whole = step.compile_fully(None).result()
    return {"bytes": whole.total_bytes, "seconds": whole.xla_seconds}


def ends(step: Step) -> dict:
    """Bytes of full recomputation, and of everything kept."""
    plans = {"least": Assignment.nothing(), "most": Assignment.everything()}
    return {end: step.compile_fully(plan).result().total_bytes for end, plan in plans.items()}


def kept_of(name: str) -> functools.partial:
    """A function of a jit that makes the step under the library's first policy."""
    training, policies, _ = stack_of(name)
    return functools.partial(training, next(iter(policies.values())))


def planned_of(name: str, budget: int) -> Training:
    """The step under the library's first policy, and under a lossless plan for `budget` bytes."""
    options = {"budget": budget, "actions": jaxmem.plans.LOSSLESS}
    return kept_of(name)(jit=functools.partial(stack_of(name)[2], **options))


def run_plan(name: str, budget: int) -> dict:
    """A plan's step on this CPU against the library's own step."""
    loss, moved = observed(planned_of(name, budget))
    own_loss, own_moved = observed(kept_of(name)())
    return {"loss": loss / own_loss, "gradient": farthest(moved, own_moved)}


def run(report: Report, name: str, target: str) -> None:
    training, policies, _ = stack_of(name)
    key = f"{name}, {target}"
    with on(target) as backend:
        default = next(iter(policies))
        steps = {p: Step(*positional(training(policy)), backend) for p, policy in policies.items()}
        planned = steps[default]
        least, most = report.once(f"{key}, ends", ends, planned).values()
        for share, budget in between(least, most, BUDGETS).items():
            row = report.once(f"{key}, {share}", planned.row, budget)
            if target == "local" and row["found"]:
                report.once(f"{key}, {share}, run", run_plan, name, budget)
        # XLA estimates no seconds for a CPU.
        for policy, step in steps.items() if target != "local" else ():
            own = report.once(f"{key}, policy {policy}", bytes_and_seconds, step)
            report.once(f"{key}, at {policy}", planned.row, planned.budget_for(own["bytes"]))
    if jax.sharding.get_abstract_mesh().axis_names:
        jax.set_mesh(None)  # a step may have set it


def summary(report: Report) -> dict:
    rows = {k: r for k, r in report.results.items() if "found" in r}
    ran = [r for r in report.results.values() if "gradient" in r]
    own = {k.replace(", policy ", ", at "): r for k, r in report.results.items() if "policy" in k}
    ratio = {
        key: row["seconds"] / rows[key]["predicted_seconds"]
        for key, row in own.items()
        if row["seconds"] and key in rows and rows[key]["found"]
    }
    first = {key.rpartition(", ")[0]: value for key, value in reversed(ratio.items())}
    mean = statistics.geometric_mean(first.values()) if first else None
    return found_of(rows.values())[1] | {
        "steps": len({k.partition(", ")[0] for k in rows}),
        "not found": [k for k, r in rows.items() if not r["found"]],
        "run": len(ran),
        "largest difference of a loss": max((abs(r["loss"] - 1) for r in ran), default=None),
        "largest difference of a gradient": max((r["gradient"] for r in ran), default=None),
        "policies": len(ratio),
        "least ratio": min(ratio.values(), default=None),
        "slower": {k: v for k, v in ratio.items() if v < 1},
        "geometric mean at the default policy's bytes": mean,
    }


# -- stacks_jit


def statements(source: str, name: str) -> list[str]:
    """The lines of a function's body in a file's source, without its docstring."""
    nodes = ast.parse(source).body
    (found,) = (n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name)
    first = found.body[ast.get_docstring(found) is not None].lineno
    return [line.strip() for line in source.splitlines()[first - 1 : found.end_lineno]]


def lines_of(name: str) -> list[str]:
    """The changed lines of a script."""
    source = (SOURCES / f"{name}.py").read_text(encoding="utf-8")
    lines = difflib.ndiff(statements(source, "own"), statements(source, "planned"))
    return ["import jaxmem", *(line[2:] for line in lines if line.startswith("+ "))]


def call_seconds(name: str) -> dict[str, float]:
    """The least CPU time of the calling thread over some calls, which alternate."""
    made = {OWN: kept_of(name)(), "jaxmem.jit": kept_of(name)(jit=stack_of(name)[2])}
    seconds = {way: [] for way in made}
    for _ in range(1 + CALLS):
        for way, training in made.items():
            args, kwargs = training.arguments()
            jax.block_until_ready(jax.tree.leaves((args, kwargs)))
            start = time.thread_time()
            result = training.step(*args, **kwargs)
            seconds[way].append(time.thread_time() - start)
            jax.block_until_ready(jax.tree.leaves(result))
    return {way: min(after) for way, (_, *after) in seconds.items()}


def first_step(name: str, budget: int | None) -> None:
    """Prints the seconds of a first call in this process; without a budget, under the own jit."""
    training = kept_of(name)() if budget is None else planned_of(name, budget)
    args, kwargs = training.arguments()
    jax.block_until_ready(jax.tree.leaves((args, kwargs)))
    start = time.perf_counter()
    jax.block_until_ready(jax.tree.leaves(training.step(*args, **kwargs)))
    print(json.dumps(time.perf_counter() - start))


def first_steps(name: str) -> dict:
    budget = int(SHARE * nbytes(kept_of(name)()))
    seconds: dict = {way: [] for way in PROCESSES}
    with own_cache():
        for way in PROCESSES:
            given = None if way == OWN else budget
            program = f"from benchmarks.stacks import first_step; first_step({name!r}, {given})"
            seconds[way].append(printed(program))
    return {"budget": budget, **seconds}


COSTS = {"lines": lines_of, "call": call_seconds, "first step": first_steps}


def summary_of_jit(report: Report) -> dict:
    found: dict = {}
    for key, row in sorted(report.results.items()):
        name, what = key.split(", ")
        told = found.setdefault(name, {})
        if what == "lines":
            told |= {"lines": len(row)}
        elif what == "call":
            own, ours = (1e6 * row[way] for way in (OWN, "jaxmem.jit"))
            told |= {"microseconds of a call": own, "microseconds more": ours - own}
        else:
            ratios = {way: min(row[way]) / min(row[OWN]) for way in (NOTHING, STORED)}
            told |= {f"first step, {way}": ratio for way, ratio in ratios.items()}
    return found


INSTALLED = [s for s, package in SCRIPTS.items() if importlib.util.find_spec(package)]
NAMES_OF_STEPS = [*SHAPES, *INSTALLED]
RESULTS = {
    "stacks": Benchmark([(n, t) for t in TARGETS for n in NAMES_OF_STEPS], run, summary),
    "stacks_jit": Benchmark(
        [(n, what) for what in COSTS for n in (SCRIPTS if what == "lines" else INSTALLED)],
        row=lambda name, what: COSTS[what](name),
        summary=summary_of_jit,
    ),
    "jit_first_steps": Benchmark(
        [(GPT, "first step")], row=lambda name, what: COSTS[what](name), summary=summary_of_jit
    ),
    "stacks_openpi": Benchmark(
        [("lora", "rtx4090"), ("full", "h100-80gb"), ("lora", "l40s"), ("full", "l40s")],
        row=lambda way, target: row_for(way, target)[0],
    ),
}

if __name__ == "__main__":
    measure("stacks", RESULTS)
