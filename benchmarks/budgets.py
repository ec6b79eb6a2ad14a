"""Plans over the range of budgets: whether one is found, in how many compiles, what it uses, how
well it was predicted.

    python -m benchmarks.budgets

The range is from the least that compiled (what the planner says of a budget that is too small) to
keep-all, which is every tag kept and the rest recomputed; the budgets divide it evenly, its ends
left out. Three more: keep-all itself, halfway from there to everything kept, and everything kept
with the planner's margin, where the plan has to be
`build(None)`'s program, compared as the text of its jaxpr. Deviceless, the planner leaves 2 % of a
budget free, so bytes are also given as a share of the rest. `compiles` counts those asked for,
whether or not one was remembered. Every second budget between is planned from nothing; the others,
as any later plan of a step is, from what earlier searches compiled.
"""

import contextlib
import itertools
import re
import statistics
import time
from unittest import mock

import jaxmem
from benchmarks.shared.case import Case
from benchmarks.shared.results import Report
from jaxmem._planner.search.history import History
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target

CASES = (("gpt_nano", "local"), ("gpt_117m", "h200"), ("gpt_345m", "h200"))
BETWEEN, ODD = 8, "1357"


def ends(case: Case) -> dict:
    """Bytes of the least that compiled, of every tag kept, and of everything kept."""
    everything = jaxmem.plan(case.build, *case.args, budget=10**15, target=case.target)
    keep = case.compile(
        {
            label: {t: c for t, c in tags.items() if t != "*"}
            for label, tags in everything.actions.items()
        }
    )
    # The arguments alone: with less, nothing would be compiled.
    none = 1 + int(everything.baseline_parts.arguments / (1 - case.backend.margin))
    try:
        jaxmem.plan(case.build, *case.args, budget=none, target=case.target)
    except jaxmem.errors.BudgetError as error:
        return {
            "least": error.least_bytes,
            "keep_all": keep[0].compiled.total_bytes,
            "everything": everything.baseline_bytes,
        }
    raise AssertionError("the arguments' bytes were enough for the step")


def at(case: Case, budget: int, from_nothing: bool) -> dict:
    start = time.perf_counter()
    forget = (
        mock.patch.object(History, "recall", return_value=[])
        if from_nothing
        else contextlib.nullcontext()
    )
    try:
        with forget:
            plan = jaxmem.plan(case.build, *case.args, budget=budget, target=case.target)
    except jaxmem.errors.BudgetError as error:
        return {"budget": budget, "found": False, "least": error.least_bytes}
    return {
        "budget": budget,
        "found": True,
        "from_nothing": from_nothing,
        "compiles": plan.compiles,
        "within": plan.compiled_bytes <= budget,
        "share_of_budget": plan.compiled_bytes / budget,
        "share_less_margin": plan.compiled_bytes / (budget * (1 - case.backend.margin)),
        "compiled_bytes": plan.compiled_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "prediction_error": abs(plan.predicted_bytes / plan.compiled_bytes - 1),
        "host_bytes": plan.host_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "baseline_seconds": plan.baseline_seconds,
        "keeps_everything": plan.keeps_everything,
        "same_program_as_no_plan": program(case, plan) == program(case, None),
        "wall_seconds": time.perf_counter() - start,
    }


def program(case: Case, plan) -> str:
    """The step's jaxpr as text, without the policy and addresses of functions, which are no part of
    what runs.
    """
    text = str(case.trace(None if plan is None else plan.actions).jaxpr)
    return re.sub(r"Policy\(.*?\)+\s|0x[0-9a-f]+", "", re.sub(r"policy=[^\n]*", "", text))


def run(report: Report, config: str, target: str) -> None:
    name = f"{config} {target}"
    with backend_for(Target.parse(target)) as backend:
        _points(report, name, Case(config, backend))


def _points(report: Report, name: str, case: Case) -> None:
    if not report.has(f"{name} ends"):
        report.add(f"{name} ends", ends(case))
    e = report[f"{name} ends"]
    budgets = {
        f"{i}/{BETWEEN + 1}": e["least"] + (e["keep_all"] - e["least"]) * i // (BETWEEN + 1)
        for i in range(1, BETWEEN + 1)
    }
    budgets |= {"keep_all": e["keep_all"], "above": (e["keep_all"] + e["everything"]) // 2}
    margin = case.backend.margin
    budgets["everything"] = int(e["everything"] / (1 - margin)) + 1 if margin else e["everything"]
    for label in sorted(
        budgets,
        key=lambda b: (b != "everything", b.isalpha(), int(b[0]) % 2 if b[0].isdigit() else 0),
    ):
        if not report.has(f"{name} {label}"):
            report.add(f"{name} {label}", at(case, budgets[label], label[0] in ODD))


def summary(report: Report, name: str) -> dict:
    rows = [r for k, r in report.results.items() if k.startswith(name) and "budget" in r]
    between = [
        r
        for r in rows
        if report[f"{name} ends"]["least"] < r["budget"] < report[f"{name} ends"]["keep_all"]
    ]
    found = sorted((r for r in rows if r["found"]), key=lambda r: r["budget"])
    inside = [r for r in between if r["found"]]
    pairs = itertools.pairwise(found)
    middle = lambda key, of=inside: statistics.median(r[key] for r in of) if of else None
    alone = [r for r in inside if r["from_nothing"]]
    return {
        "budgets": len(rows),
        "between least and keep-all": len(between),
        "of those, found": len(inside),
        "within the budget": sum(r["within"] for r in found),
        "most compiles": max((r["compiles"] for r in found), default=None),
        "median share of budget": middle("share_of_budget"),
        "median share less margin": middle("share_less_margin"),
        "median prediction error": middle("prediction_error"),
        "median prediction error, planned from nothing": middle("prediction_error", alone),
        "median compiles, planned from nothing": middle("compiles", alone),
        "median compiles": middle("compiles"),
        "largest prediction error": max((r["prediction_error"] for r in inside), default=None),
        "times that rose with the budget": sum(
            b["predicted_seconds"] > a["predicted_seconds"] * (1 + 1e-9) for a, b in pairs
        ),
        "build(None)'s program at everything": all(
            r["same_program_as_no_plan"] for r in found if r["keeps_everything"]
        ),
    }


def main() -> None:
    report = Report("budgets")
    for config, target in CASES:
        run(report, config, target)
        done = [f"{c} {t}" for c, t in CASES if report.has(f"{c} {t} ends")]
        report.summarise({name: summary(report, name) for name in done})


if __name__ == "__main__":
    main()
