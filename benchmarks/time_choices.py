"""Does the cost model know what a choice costs on a GPU? Its differences against XLA's estimates of
whole compiled steps for an H200.

    python -m benchmarks.time_choices

Of each config, the step with every tag kept is compared with the step with nothing kept, with
everything kept, and with each tag alone left out: `xla` and `model` are by how much longer the step
takes, as shares of the step with every tag kept; errors are their differences. XLA prices no copies
to the host, and its estimates are no measurements.
"""

import statistics

from benchmarks.shared.case import case_on
from benchmarks.shared.results import Report
from jaxmem._core.actions import KEEP, LOSSLESS, REST
from jaxmem._core.assignment import Assignment
from jaxmem._planner.solve.cost import evaluate
from jaxmem._trace.step import trace

CONFIGS = ("gpt_117m", "gpt_345m", "bert_base")
OVERRIDES = ("optimizer.accumulation=scan", "optimizer.clip=norm")
TARGET = "h200"
EVERY = "every tag kept"


def run(report: Report, name: str) -> None:
    with case_on(TARGET, name, *OVERRIDES, allowed=LOSSLESS) as case:
        made = case.profile
        (label,) = {b.name for b in made.blocks}
        tags = list(dict.fromkeys(t.name for b in made.blocks for t in b.tags))
        chosen = {EVERY: dict.fromkeys(tags, KEEP), "nothing kept": {}, "everything": {REST: KEEP}}
        chosen |= {f"not {t}": {u: KEEP for u in tags if u != t} for t in tags}
        wanted = {k: {label: v} for k, v in chosen.items() if not report.has(f"{name}, {k}")}
        # All are handed in before the first is waited for.
        traced = {k: trace(case.build, Assignment(v), case.args) for k, v in wanted.items()}
        futures = {k: case.backend.compile(*one) for k, one in traced.items()}
        for key, actions in wanted.items():
            seconds = futures[key].result().xla_seconds
            model = evaluate(made, actions).seconds
            report.add(f"{name}, {key}", {"xla_seconds": seconds, "model_seconds": model})


def of_case(report: Report, name: str) -> dict:
    rows = report.under(f"{name}, ")
    base = rows.pop(EVERY)
    longer = lambda row, key: (row[key] - base[key]) / base["xla_seconds"]
    choices = {
        name: {which: longer(row, f"{which}_seconds") for which in ("xla", "model")}
        for name, row in rows.items()
    }
    errors = {name: abs(c["model"] - c["xla"]) for name, c in choices.items()}
    return {
        "choices": choices,
        "median error": statistics.median(errors.values()),
        "largest error": max(errors.values()),
        "of": max(errors, key=lambda name: errors[name]),
    }


def main() -> None:
    Report("time_choices").of_each(CONFIGS, run, of_case)


if __name__ == "__main__":
    main()
