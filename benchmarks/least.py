"""Does the least that a search finds depend on luck?

    python -m benchmarks.least

A budget one byte above the arguments is asked for, which no plan meets, and the refusal names the
least bytes that compiled. That is done ten times from nothing, with another seed for the search
each time, and three times more after another budget was planned: these know the compiles of all
searches before. `spread` is the largest of these least bytes over the smallest, less 1. Beside them
stand the bytes of full recomputation, and what the refusals took.
"""

import contextlib
import time
from unittest import mock

import jaxmem
from benchmarks.shared.case import Case
from benchmarks.shared.results import Report, say
from jaxmem._planner.search import local_search
from jaxmem._planner.search.history import History
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target

CASES = (("gpt_nano", "local"), ("gpt_117m", "h200"), ("gpt_345m", "h200"))
SEEDS = range(10)
HISTORIES = (0.9, 0.6, 0.4)  # shares of the bytes of everything kept, planned for in turn


def refusal(case: Case, budget: int, seed: int, cold: bool) -> dict:
    """The least that a search names, with its compiles and seconds."""
    forget = mock.patch.object(History, "recall", return_value=[]) if cold else None
    start = time.perf_counter()
    with mock.patch.object(local_search, "SEED", seed), forget or contextlib.nullcontext():
        try:
            jaxmem.plan(case.build, *case.args, budget=budget, target=case.target)
        except jaxmem.errors.BudgetError as error:
            return {"least": error.least_bytes, "seconds": time.perf_counter() - start}
    raise AssertionError("the arguments' bytes were enough for the step")


def run(report: Report, config: str, target: str) -> None:
    with backend_for(Target.parse(target)) as backend:
        case = Case(config, backend)
        name = f"{config} {target}"
        whole, nothing = case.compile(None, {b.name: {} for b in case.profile.blocks})
        none = 1 + int(whole.compiled.argument_bytes / (1 - backend.margin))
        if not report.has(f"{name} ends"):
            sizes = {
                "everything": whole.compiled.total_bytes,
                "recomputed": nothing.compiled.total_bytes,
            }
            report.add(f"{name} ends", sizes)
        for seed in SEEDS:
            if not report.has(f"{name} seed {seed}"):
                say(f"{name}, seed {seed}")
                report.add(f"{name} seed {seed}", refusal(case, none, seed, cold=True))
        for share in HISTORIES:
            if not report.has(f"{name} after {share}"):
                say(f"{name}, after a plan for {share}")
                budget = int(share * whole.compiled.total_bytes)
                jaxmem.plan(case.build, *case.args, budget=budget, target=case.target)
                report.add(
                    f"{name} after {share}", refusal(case, none, local_search.SEED, cold=False)
                )


def summary(report: Report, name: str) -> dict:
    rows = report.results
    found = [r["least"] for k, r in rows.items() if k.startswith(name) and "least" in r]
    cold = [r["least"] for k, r in rows.items() if k.startswith(f"{name} seed")]
    return {
        "searches": len(found),
        "least": min(found),
        "spread": max(found) / min(found) - 1,
        "spread over seeds": max(cold) / min(cold) - 1,
        "of full recomputation, at most": max(found) / rows[f"{name} ends"]["recomputed"],
    }


def main() -> None:
    report = Report("least")
    for config, target in CASES:
        run(report, config, target)
        done = [f"{c} {t}" for c, t in CASES if report.has(f"{c} {t} seed 0")]
        report.summarise({name: summary(report, name) for name in done})


if __name__ == "__main__":
    main()
