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

import itertools
import re
import statistics

from benchmarks.shared.case import Case, between, case_on, forgetting, of_rows
from benchmarks.shared.results import Report

CASES = (("gpt_nano", "local"), ("gpt_117m", "h200"), ("gpt_345m", "h200"))
BETWEEN, ODD = 8, "1357"


def ends(case: Case) -> dict:
    """Bytes of the least that compiled, of every tag kept, and of everything kept."""
    everything = case.plan(10**15)
    kept = {
        label: {t: c for t, c in tags.items() if t != "*"}
        for label, tags in everything.actions.items()
    }
    return {
        "least": case.least(everything.baseline_parts.arguments),
        "keep_all": case.compile(kept)[0].compiled.total_bytes,
        "everything": everything.baseline_bytes,
    }


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


def run(report: Report, config: str, target: str) -> None:
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


def of_case(report: Report, name: str) -> dict:
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


def main() -> None:
    Report("budgets").of_each(CASES, run, of_case)


if __name__ == "__main__":
    main()
