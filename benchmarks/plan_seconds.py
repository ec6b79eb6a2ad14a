"""How long planning gpt_345m for an H200, and for a TPU v5e, takes from nothing: no time database,
no compile remembered, a new process.

    python -m benchmarks.plan_seconds

Wall seconds depend on what else the machine runs, so the processor's seconds (planner and its
compiling processes) and the load are reported beside them: on n idle cores a plan cannot take less
than processor seconds / n.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks.shared.results import Report

CONFIG = "gpt_345m"
GOALS = {("h200", "16GiB"): 120, ("v5e", "12GiB"): 180}  # seconds
CHILD = f"""
import json, sys, time
start = time.perf_counter()
import jax
if sys.argv[2].startswith("v"):  # Of threefry's dropout, XLA:TPU writes dozens of arrays.
    jax.config.update("jax_default_prng_impl", "rbg")
from experiments.command.load import load
from experiments.running.planning import new_plan
imported = time.perf_counter()
settings = ["plan.budget=" + sys.argv[1], "plan.target=" + sys.argv[2]]
plan = new_plan(load({CONFIG!r}, settings))
total = time.perf_counter() - start
print(json.dumps(dict(
    total=total, imports=imported - start, profile=plan.profile_seconds,
    solve=plan.solve_seconds, compile=plan.compile_seconds, compiles=plan.compiles,
    budget_bytes=plan.budget_bytes, compiled_bytes=plan.compiled_bytes,
    predicted_bytes=plan.predicted_bytes, time_source=plan.time_source,
)))
"""


def one(target: str, budget: str) -> dict:
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


def summary(report: Report) -> dict:
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


def run(report: Report, target: str, budget: str) -> None:
    report.once(f"{target} {budget}", one, target, budget)


def main() -> None:
    Report("plan_seconds").for_each(GOALS, run, summary)


if __name__ == "__main__":
    main()
