"""Training steps of libraries under plans, against the libraries' own remat policies.

    python -m benchmarks.stacks

Each step is a script of `examples/stacks/` that trains with a real package, if the package is
installed (`make stacks`), or a step in the exact shape of a library, of `tests/shared/shapes/`. The
step as the library jits it goes to `jaxmem.plan(jaxmem.auto(step), ...)` at three budgets, which
divide the range from full recomputation to everything kept, for this CPU, for an H200, and for a
TPU v5e; for the latter two from shapes. On the CPU each lossless plan's step is run: `loss` is its
loss over the library's, and `gradient` the largest difference of a gradient, relative to the
gradient's largest element.

For each of the library's own policies, `policies` has the bytes and XLA's seconds of the step. A
plan is made at the bytes of each policy, and `ratio` is the policy's seconds over the plan's.
"""

import contextlib
import functools
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator

import jax

import jaxmem
from benchmarks.shared.case import Step, between, on
from benchmarks.shared.results import Benchmark, Report, measure
from examples.stacks.training import Training, farthest, observed
from jaxmem._core.assignment import Assignment
from jaxmem._trace.signature import Signature
from jaxmem._trace.step import trace
from tests.shared.foreign.size import Size
from tests.shared.shapes.table import SHAPES

SCRIPTS = {
    "equimo": "equimo", "gemma": "kauldron", "levanter": "levanter", "transformers": "transformers",
    "tunix": "tunix",
}  # fmt: skip
SIZE = Size(width=256, heads=8, layers=6, batch=8, sequence=256, vocab=512)
TARGETS = "h200", "v5e", "local"
BUDGETS = 3


def stack_of(name: str) -> tuple[Callable[..., Training], dict]:
    """A function of a policy that makes the step, and the library's policies. Shapes have a size
    that is large enough for an H200, in which kernels take longer than their launches.
    """
    if name in SHAPES:
        return functools.partial(SHAPES[name].make, size=SIZE), SHAPES[name].policies
    module = importlib.import_module(f"examples.stacks.{name}")
    return module.training, getattr(module, "POLICIES", {"none": None})


def positional(training: Training) -> tuple[Callable, tuple]:
    """The step as the library jits it, for `jaxmem.plan`, with shapes of its arguments."""
    args, kwargs = training.arguments()
    signature = Signature(training.step, {})
    values, called = signature.positional(args, kwargs)
    return jaxmem.auto(called(training.step)), signature.shapes(values)


def step_on(training: Training, backend) -> Step:
    return Step(*positional(training), backend)


@contextlib.contextmanager
def own_mesh() -> Iterator[None]:
    """A step may set a mesh, which is unset afterwards."""
    yield
    if jax.sharding.get_abstract_mesh().axis_names:
        jax.set_mesh(None)


def bytes_and_seconds(step: Step) -> dict:
    """Of the step as the library wrote it."""
    whole = step.backend.compile_fully(*trace(step.build, None, step.args)).result()
    return {"bytes": whole.total_bytes, "seconds": whole.xla_seconds}


def ends(step: Step) -> dict:
    """Bytes of full recomputation, and of everything kept."""
    least, most = (
        step.backend.compile_fully(*trace(step.build, plan, step.args)).result().total_bytes
        for plan in (Assignment.nothing(), Assignment.everything())
    )
    return {"least": least, "most": most}


def run_plan(name: str, budget: int) -> dict:
    """A plan's step on this CPU against the library's own step."""
    training, policies = stack_of(name)
    kept = next(iter(policies.values()))
    options = {"budget": budget, "actions": jaxmem.plans.LOSSLESS}
    loss, moved = observed(training(kept, jit=functools.partial(jaxmem.jit, **options)))
    own_loss, own_moved = observed(training(kept))
    return {"loss": loss / own_loss, "gradient": farthest(moved, own_moved)}


def run(report: Report, name: str, target: str) -> None:
    training, policies = stack_of(name)
    key = f"{name}, {target}"
    with on(target) as backend, own_mesh():
        default = next(iter(policies))
        steps = {p: step_on(training(policy), backend) for p, policy in policies.items()}
        planned = steps[default]
        least, most = report.once(f"{key}, ends", ends, planned).values()
        for share, budget in between(least, most, BUDGETS).items():
            row = report.once(f"{key}, {share}", planned.row, budget)
            if target == "local" and row["found"]:
                report.once(f"{key}, {share}, run", run_plan, name, budget)
        if target == "local":
            return  # XLA estimates no seconds for a CPU
        for policy, step in steps.items():
            own = report.once(f"{key}, policy {policy}", bytes_and_seconds, step)
            report.once(f"{key}, at {policy}", planned.row, planned.budget_for(own["bytes"]))


def summary(report: Report) -> dict:
    rows = {k: r for k, r in report.results.items() if "found" in r}
    found = [r for r in rows.values() if r["found"]]
    ran = [r for r in report.results.values() if "gradient" in r]
    own = {k.replace(", policy ", ", at "): r for k, r in report.results.items() if "policy" in k}
    pairs = {k: (r, rows[k]) for k, r in own.items() if k in rows and rows[k]["found"]}
    ratio = {
        k: policy["seconds"] / plan["predicted_seconds"]
        for k, (policy, plan) in pairs.items()
        if policy["seconds"]
    }
    stacks = {k.rpartition(", ")[0] for k in ratio}
    first = [next(v for k, v in ratio.items() if k.startswith(stack)) for stack in stacks]
    return {
        "steps": len({k.partition(", ")[0] for k in rows}),
        "budgets": len(rows),
        "found": len(found),
        "within": sum(r["within"] for r in found),
        "not found": [k for k, r in rows.items() if not r["found"]],
        "run": len(ran),
        "largest difference of a loss": max((abs(r["loss"] - 1) for r in ran), default=None),
        "largest difference of a gradient": max((r["gradient"] for r in ran), default=None),
        "policies": len(ratio),
        "least ratio": min(ratio.values(), default=None),
        "slower": {k: v for k, v in ratio.items() if v < 1},
        "geometric mean at the default policy's bytes": (
            statistics.geometric_mean(first) if first else None
        ),
    }


NAMES_OF_STEPS = [
    *SHAPES, *(s for s, package in SCRIPTS.items() if importlib.util.find_spec(package)),
]  # fmt: skip
RESULTS = {"stacks": Benchmark([(n, t) for t in TARGETS for n in NAMES_OF_STEPS], run, summary)}

if __name__ == "__main__":
    measure("stacks", RESULTS)
