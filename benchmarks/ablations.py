"""What each phase of the search gains: plans with one phase switched off, at the same budgets.

    python -m benchmarks.ablations

The phases: local search near the least bytes, refinement by whole steps (which runs where buffers
are assigned before a compile is done: for TPUs), and groups of layers. Budgets: the least that
compiled, 3 % more, and three between the least and everything kept. Every plan is searched from
nothing: no earlier compile is recalled, and times of pieces are the same in all variants. Seconds
are predicted; on a device that is not there they are XLA's estimate of the compiled step, or the
roofline of its fusions. A ratio is the variant's over the search's: above 1, the phase gains.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from unittest import mock

import jaxmem
from benchmarks.shared.case import Case
from benchmarks.shared.results import Report
from jaxmem._planner.search import begin, candidates, least, search
from jaxmem._planner.search.history import History
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target

CASES = (("gpt_nano", "local"), ("gpt_117m", "h200"), ("gpt_117m", "v5e"))
SHARES = (0.0, 0.03, 0.25, 0.5, 0.75)  # of what everything kept takes beyond the least
WORTH = 0.01

Patches = tuple[tuple[object, str, Callable], ...]
PHASES: dict[str, Patches] = {
    "nothing": (),
    "local search": (
        (candidates, "_descended", lambda *args: None),
        (begin, "local_search", lambda *args: None),
        (least, "local_search", lambda *args: None),
    ),
    "whole steps": ((search, "refine_by_whole_steps", lambda search: {}),),
    "groups": ((search, "divide", lambda search, best, clock: (best, None)),),
}


@contextlib.contextmanager
def without(phase: str):
    """A search without one phase, that recalls nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(History, "recall", return_value=[]))
        stack.enter_context(mock.patch.object(History, "recall_least", return_value=None))
        for owner, name, instead in PHASES[phase]:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def planned(case: Case, budget: int, phase: str) -> dict:
    start = time.perf_counter()
    with without(phase):
        try:
            plan = jaxmem.plan(case.build, *case.args, budget=budget, target=case.target)
        except jaxmem.errors.BudgetError as error:
            return {"found": False, "least": error.least_bytes}
    return {
        "found": True,
        "bytes": plan.compiled_bytes,
        "seconds": plan.predicted_seconds,
        "compiles": plan.compiles,
        "wall_seconds": time.perf_counter() - start,
    }


def run(report: Report, config: str, target: str) -> None:
    name = f"{config} {target}"
    with backend_for(Target.parse(target)) as backend:
        case = Case(config, backend)
        if not report.has(f"{name} ends"):
            report.add(f"{name} ends", ends(case))
        low, high = (report[f"{name} ends"][key] for key in ("least", "everything"))
        for share in SHARES:
            for phase in PHASES:
                key = f"{name} {share} without {phase}"
                if not report.has(key):
                    budget = int((low + share * (high - low)) / (1 - backend.margin)) + 1
                    report.add(key, planned(case, budget, phase))


def ends(case: Case) -> dict:
    """The least bytes of a budget that is refused, and those with everything kept."""
    everything = jaxmem.plan(case.build, *case.args, budget=10**15, target=case.target)
    none = 1 + int(everything.baseline_parts.arguments / (1 - case.backend.margin))
    refused = planned(case, none, "nothing")
    return {"least": refused["least"], "everything": everything.baseline_bytes}


def summary(report: Report, name: str) -> dict:
    """By phase: by what share plans take longer without it, and where no plan is found without."""
    found = {}
    for phase in PHASES:
        ratios, lost = [], []
        for share in SHARES:
            own, other = (report[f"{name} {share} without {p}"] for p in ("nothing", phase))
            if own["found"] and other["found"]:
                ratios.append(other["seconds"] / own["seconds"])
            elif own["found"]:
                lost.append(share)
        found[phase] = {
            "time ratios": ratios,
            "mean ratio": statistics.fmean(ratios) if ratios else None,
            "budgets refused without it": lost,
            "worth it": bool(lost) or (bool(ratios) and max(ratios) > 1 + WORTH),
        }
    return {phase: told for phase, told in found.items() if phase != "nothing"}


def main() -> None:
    report = Report("ablations")
    for config, target in CASES:
        run(report, config, target)
        done = [f"{c} {t}" for c, t in CASES if report.has(f"{c} {t} {SHARES[-1]} without groups")]
        report.summarise({name: summary(report, name) for name in done})


if __name__ == "__main__":
    main()
