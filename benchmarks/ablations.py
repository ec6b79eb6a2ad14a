"""What each phase of the search gains: plans with one phase switched off, at the same budgets.

    python -m benchmarks.ablations

The phases: local search near the least bytes, refinement by whole steps (which runs where buffers
are assigned before a compile is done: for TPUs), and groups of layers. The steps train configs
without a tag or a checkpoint, under `jaxmem.auto`, so that layers can be grouped. Budgets:
between the least that compiled and everything kept, most of them near the least. Every plan is
searched from nothing: no earlier compile is recalled, and times of pieces are the same. Seconds are
predicted; on a device that is not there they are XLA's estimate of the compiled step,
or the roofline of its fusions. A ratio is the variant's over the search's: above 1, the phase
gains.
"""

import contextlib
import statistics
from collections.abc import Callable
from unittest import mock

import jaxmem
from benchmarks.foreign import OVERRIDES, untagged
from benchmarks.shared.case import Step, forgetting, on
from benchmarks.shared.results import Benchmark, Report, measure
from experiments.command.load import load
from experiments.steps.step import abstract
from jaxmem._planner.search import begin, candidates, least, search
from jaxmem._planner.search.history import History

# Config, target and the allowed actions; "default" is what a plan may use without a request.
CASES = (
    ("gpt_nano", "local", "default"),
    ("gpt_117m", "h200", "default"),
    ("gpt_117m", "h200", "keep,recompute"),
    ("gpt_117m", "v5e", "default"),
)
# Budgets by target: the share of the bytes between the least and everything kept.
SHARES = {
    "local": (0.002, 0.03, 0.07, 0.2),
    "h200": (0.002, 0.03, 0.06, 0.085, 0.1, 0.11, 0.2),
    "v5e": (0.002, 0.03, 0.07),
}
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
    "groups": ((search, "divide", lambda search, best, step_time: (best, None)),),
}


def planned(case: Step, budget: int, phase: str, actions: str) -> dict:
    """What becomes of a budget in a search without one phase, that recalls nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(forgetting())
        stack.enter_context(mock.patch.object(History, "recall_least", return_value=None))
        for owner, name, instead in PHASES[phase]:
            stack.enter_context(mock.patch.object(owner, name, instead))
        return case.row(budget, actions=None if actions == "default" else actions)


def ends(case: Step, actions: str) -> dict:
    """The least bytes of a budget that is refused, and those with everything kept."""
    everything = case.plan(10**15)
    none = 1 + int(everything.baseline_parts.arguments / (1 - case.backend.margin))
    refused = planned(case, none, "nothing", actions)
    return {"least": refused["least"], "everything": everything.baseline_bytes}


def run(report: Report, config: str, target: str, actions: str) -> None:
    name = f"{config} {target} {actions}"
    chosen = load(config, OVERRIDES)
    with on(target) as backend:
        case = Step(jaxmem.auto(untagged(chosen)), abstract(chosen), backend)
        low, high = report.once(f"{name} ends", ends, case, actions).values()
        for share in SHARES[target]:
            budget = int((low + share * (high - low)) / (1 - case.backend.margin)) + 1
            for phase in PHASES:
                if phase == "whole steps" and not case.backend.stops_at_buffers:
                    continue
                report.once(
                    f"{name} {share} without {phase}", planned, case, budget, phase, actions
                )


def of_phase(report: Report, name: str, phase: str) -> dict:
    """By what share plans take longer without a phase, and where no plan is found without it."""
    ratios, lost = [], []
    for share in SHARES[name.split()[1]]:
        own, other = (report[f"{name} {share} without {p}"] for p in ("nothing", phase))
        if own["found"] and other["found"]:
            ratios.append(other["predicted_seconds"] / own["predicted_seconds"])
        elif own["found"]:
            lost.append(share)
    return {
        "time ratios": ratios,
        "mean ratio": statistics.fmean(ratios) if ratios else None,
        "budgets refused without it": lost,
        "worth it": bool(lost) or (bool(ratios) and max(ratios) > 1 + WORTH),
    }


def of_case(report: Report, name: str) -> dict:
    """The gain of each phase that ran for the case."""
    ran = [p for p in PHASES if p != "nothing" and report.has(f"{name} 0.002 without {p}")]
    return {p: of_phase(report, name, p) for p in ran}


RESULTS = {"ablations": Benchmark(CASES, run, of_case=of_case)}

if __name__ == "__main__":
    measure("ablations", RESULTS)
