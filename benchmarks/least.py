"""Does the least that a search finds depend on luck?

    python -m benchmarks.least

A budget one byte above the arguments is asked for, which no plan meets, and the refusal names the
least bytes that compiled. That is done ten times from nothing, with another seed for the descent
each time, and three times more after another budget was planned: these know the compiles of all
searches before. `spread` is the largest of these least bytes over the smallest, less 1. Beside them
stand the bytes of full recomputation, and what the refusals took.
"""

import time
from unittest import mock

from benchmarks.shared.assignments import recomputed
from benchmarks.shared.case import Case, case_on, forgetting
from benchmarks.shared.results import Report
from jaxmem._planner.search import local_search

CASES = (("gpt_nano", "local"), ("gpt_117m", "h200"), ("gpt_345m", "h200"))
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


def run(report: Report, config: str, target: str) -> None:
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


def of_case(report: Report, name: str) -> dict:
    found = [r["least"] for r in report.under(f"{name} ").values() if "least" in r]
    cold = [r["least"] for r in report.under(f"{name} seed").values()]
    return {
        "searches": len(found),
        "least": min(found),
        "spread": max(found) / min(found) - 1,
        "spread over seeds": max(cold) / min(cold) - 1,
        "of full recomputation, at most": max(found) / report[f"{name} ends"]["recomputed"],
    }


def main() -> None:
    Report("least").of_each(CASES, run, of_case)


if __name__ == "__main__":
    main()
