"""Plans over a range of budgets: whether a plan is found, its bytes, and how well they were
predicted; the least bytes; and how long planning takes.

    python -m benchmarks.budgets [RESULT ...]

The range is from the least bytes that compiled (the refusal of a budget that is too small names
them) to a largest budget. The budgets divide the range evenly, without its ends. Deviceless, the
planner leaves 2 % of a budget free, so bytes are also given as a share of the rest. `compiles`
counts all requested compiles, recalled ones included. Times are the planner's; no step runs on a
GPU or a TPU.

`budgets`: up to keep-all, which keeps every tag and recomputes the rest. Three more budgets:
keep-all itself, halfway from there to everything kept, and everything kept with the planner's
margin. At the last budget the plan must be `build(None)`'s program, compared as the text of its
jaxpr. Every second budget is planned from nothing; the others use earlier searches' compiles, as
any later plan of a step does.

`tpu_budgets`: up to everything kept, for TPUs without hardware. A budget beyond the device's memory
is replaced by the device's memory. Random bits are rbg's, as is common on TPUs.

`least`: does the least that a search finds depend on luck? A budget one byte above the arguments is
requested, which no plan meets: ten times from nothing, with another seed for the descent each time,
and three times more after another budget was planned, with the compiles of all searches before.
`spread` is the largest of these least bytes over the smallest, less 1. The results also hold the
bytes of full recomputation, and the seconds of the refusals.

`plan_seconds`: the time of planning gpt_345m in a new process, with no time database and no
remembered compile. Wall seconds depend on the machine's other work, so the processor's seconds
(planner and its compiling processes) and the load are listed too: on n idle cores a plan takes at
least processor seconds / n.
"""

import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import jaxmem
from benchmarks.shared import sharded_llama
from benchmarks.shared.assignments import recomputed
from benchmarks.shared.case import (
    Case,
    Step,
    between,
    case_on,
    forgetting,
    of_rows,
    on,
    random_bits_for,
)
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.steps import of_config, shapes, step_of
from jaxmem._planner.search import local_search
from tests.shared.foreign import libraries
from tests.shared.foreign.size import Size

GPTS = (("gpt_nano", "local"), ("gpt_117m", "h200"), ("gpt_345m", "h200"))
BETWEEN = 8
ARGUMENTS = 2**20  # bytes beyond the arguments of the step with everything kept


def ends(step: Step) -> dict:
    """Bytes of the least that compiled, of every tag kept, and of everything kept."""
    everything, keep_all = (s.compiled for s in step.compile(None, step.keep_tags))
    return {
        "least": step.least(everything.argument_bytes + ARGUMENTS),
        "keep_all": keep_all.total_bytes,
        "everything": everything.total_bytes,
        "everything_seconds": everything.xla_seconds,
    }


# -- budgets

ODD = "1357"


def at(case: Case, budget: int, from_nothing: bool) -> dict:
    with forgetting(from_nothing):
        plan, row = case.attempt(budget)
    if plan is None:
        return row
    same = program(case, plan) == program(case, None)
    return row | {"from_nothing": from_nothing, "same_program_as_no_plan": same}


def program(case: Case, plan) -> str:
    """The step's jaxpr as text, without the policy and addresses of functions, which are no part of
    what runs.
    """
    text = str(case.trace(None if plan is None else plan.actions).jaxpr)
    return re.sub(r"Policy\(.*?\)+\s|0x[0-9a-f]+", "", re.sub(r"policy=[^\n]*", "", text))


def of_gpt(report: Report, config: str, target: str) -> None:
    name = f"{config} {target}"
    with case_on(target, config) as case:
        e = report.once(f"{name} ends", ends, case)
        divided = between(e["least"], e["keep_all"], BETWEEN)
        even = {label: budget for label, budget in divided.items() if label[0] not in ODD}
        # In the order in which they are planned: what is not from nothing recalls those before it.
        budgets = {"everything": case.budget_for(e["everything"])} | even
        budgets |= {"keep_all": e["keep_all"]} | divided
        budgets["above"] = (e["keep_all"] + e["everything"]) // 2
        for label, budget in budgets.items():
            report.once(f"{name} {label}", at, case, budget, label[0] in ODD)


def summary_of_gpt(report: Report, name: str) -> dict:
    rows = report.under(f"{name} ")
    e = rows.pop("ends")
    inside = [r for r in rows.values() if e["least"] < r["budget"] < e["keep_all"]]
    found = sorted((r for r in rows.values() if r["found"]), key=lambda r: r["budget"])
    alone = [r for r in inside if r["found"] and r["from_nothing"]]
    told, between_ends = of_rows(rows.values()), of_rows(inside)
    less_margin = [r["share_less_margin"] for r in inside if r["found"]]
    return {
        "budgets": told["budgets"],
        "between least and keep-all": between_ends.pop("budgets"),
        "of those, found": between_ends.pop("found"),
        "within the budget": told["within"],
        **between_ends,
        "most compiles": told["most compiles"],
        "median share less margin": statistics.median(less_margin),
        "planned from nothing": of_rows(alone),
        "times that rose with the budget": sum(
            b["predicted_seconds"] > a["predicted_seconds"] * (1 + 1e-9)
            for a, b in itertools.pairwise(found)
        ),
        "build(None)'s program at everything": all(
            r["same_program_as_no_plan"] for r in found if r["keeps_everything"]
        ),
    }


# -- tpu_budgets

VIT = Size(width=768, heads=12, layers=12, batch=64, sequence=224, vocab=1000)
TPU_CASES = (
    *(f"{name} {target}" for name in ("gpt_117m", "gpt_345m") for target in ("v5e", "v5p", "v6e")),
    *(f"llama_1b {target}" for target in ("v5e:4x4", "v5p:2x2x4", "v6e:4x4")),
    *(f"vit {target}" for target in ("v5e", "v5p", "v6e")),
)


def step_for(name: str, devices: int) -> tuple[Callable, tuple]:
    """(`build`, its arguments' shapes)."""
    if name == "llama_1b":
        return sharded_llama.build_and_arguments(devices)
    if name == "vit":
        loss, params, rest = libraries.vit(VIT)
        return jaxmem.auto(step_of(loss)), shapes((params, *rest))
    return of_config(name)


def of_tpu(report: Report, key: str) -> None:
    name, target = key.split()
    if all(report.has(f"{key} {i}/{BETWEEN + 1}") for i in range(1, BETWEEN + 1)):
        return
    random_bits_for(target)
    with on(target) as backend:
        step = Step(*step_for(name, backend.target.devices), backend)
        e, most = report.once(f"{key} ends", ends, step), backend.target.usable_bytes
        for label, budget in between(e["least"], e["everything"], BETWEEN).items():
            report.once(f"{key} {label}", step.row, min(budget, most))


def summary_of_tpu(report: Report, key: str) -> dict:
    return of_rows(r for k, r in report.under(f"{key} ").items() if k != "ends")


# -- least

SEEDS = range(10)
HISTORIES = (0.9, 0.6, 0.4)  # shares of the bytes of everything kept, planned for in turn


def refusal(case: Case, arguments: int, seed: int, cold: bool) -> dict:
    """The least that a search names, with its seconds."""
    start = time.perf_counter()
    with mock.patch.object(local_search, "SEED", seed), forgetting(cold):
        least = case.least(arguments)
    return {"least": least, "seconds": time.perf_counter() - start}


def after(case: Case, arguments: int, budget: int) -> dict:
    case.plan(budget)
    return refusal(case, arguments, local_search.SEED, cold=False)


def of_luck(report: Report, config: str, target: str) -> None:
    name = f"{config} {target}"
    with case_on(target, config) as case:
        steps = case.compile(None, recomputed(case.profile))
        sizes = [step.compiled.total_bytes for step in steps]
        arguments = steps[0].compiled.argument_bytes
        report.once(f"{name} ends", lambda: dict(zip(("everything", "recomputed"), sizes)))
        for seed in SEEDS:
            report.once(f"{name} seed {seed}", refusal, case, arguments, seed, cold=True)
        for share in HISTORIES:
            report.once(f"{name} after {share}", after, case, arguments, int(share * sizes[0]))


def summary_of_luck(report: Report, name: str) -> dict:
    found = [r["least"] for r in report.under(f"{name} ").values() if "least" in r]
    cold = [r["least"] for r in report.under(f"{name} seed").values()]
    return {
        "searches": len(found),
        "least": min(found),
        "spread": max(found) / min(found) - 1,
        "spread over seeds": max(cold) / min(cold) - 1,
        "of full recomputation, at most": max(found) / report[f"{name} ends"]["recomputed"],
    }


# -- plan_seconds

GOALS = {("h200", "16GiB"): 120, ("v5e", "12GiB"): 180}  # seconds
CHILD = """
import json, sys, time
start = time.perf_counter()
from benchmarks.shared.case import random_bits_for
from experiments.command.load import load
from experiments.running.planning import new_plan
random_bits_for(sys.argv[2])
imported = time.perf_counter()
plan = new_plan(load("gpt_345m", ["plan.budget=" + sys.argv[1], "plan.target=" + sys.argv[2]]))
total = time.perf_counter() - start
print(json.dumps(dict(
    total=total, imports=imported - start, profile=plan.profile_seconds,
    solve=plan.solve_seconds, compile=plan.compile_seconds, compiles=plan.compiles,
    budget_bytes=plan.budget_bytes, compiled_bytes=plan.compiled_bytes,
    predicted_bytes=plan.predicted_bytes, time_source=plan.time_source,
)))
"""


def from_nothing(target: str, budget: str) -> dict:
    with tempfile.TemporaryDirectory() as empty:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        environment = os.environ | {"XDG_CACHE_HOME": empty, "JAX_COMPILATION_CACHE_DIR": ""}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, budget, target],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout.splitlines()[-1])
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found | {
        "process_seconds": wall,
        "processor_seconds": processor,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def of_seconds(report: Report) -> dict:
    told = {}
    for (target, budget), goal in GOALS.items():
        row = report[f"{target} {budget}"]
        told[target] = {
            "goal_seconds": goal,
            "seconds": row["process_seconds"],
            "least_that_idle_cores_allow": row["processor_seconds"] / row["cores"],
            "reached": row["process_seconds"] <= goal,
        }
    return told


RESULTS = {
    "budgets": Benchmark(GPTS, of_gpt, of_case=summary_of_gpt),
    "tpu_budgets": Benchmark(TPU_CASES, of_tpu, of_case=summary_of_tpu),
    "least": Benchmark(GPTS, of_luck, of_case=summary_of_luck),
    "plan_seconds": Benchmark(
        GOALS,
        lambda report, *case: report.once(" ".join(case), from_nothing, *case),
        of_seconds,
    ),
}

if __name__ == "__main__":
    measure("budgets", RESULTS)
