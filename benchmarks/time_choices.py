"""Does the cost model know what a choice costs on a GPU? Its differences against XLA's estimates of
whole compiled steps for an H200.

    python -m benchmarks.time_choices

Of each config, the step with every tag kept is compared with the step with nothing kept, with
everything kept, and with each tag alone left out: `xla` and `model` are by how much longer the step
takes, as shares of the step with every tag kept; errors are their differences. XLA prices no copies
to the host, and its estimates are no measurements.
"""

import statistics

from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import KEEP, LOSSLESS, REST
from jaxmem._core.assignment import Assignment
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compile.backend import Deviceless
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace

CONFIGS = ("gpt_117m", "gpt_345m", "bert_base")
OVERRIDES = ("optimizer.accumulation=scan", "optimizer.clip=norm")
TARGET = "h200"
EVERY = "every tag kept"


def run(report: Report, name: str) -> None:
    config = load(name, OVERRIDES)
    args, build = abstract(config), lambda plan: make_step(config, plan)
    with Deviceless(Target.parse(TARGET)) as backend:
        steps = StepCompiler(build, args, backend)
        made = profile(steps.trace(Assignment.nothing()).jaxpr, backend, Allowed(LOSSLESS))
        (label,) = {b.name for b in made.blocks}
        tags = list(dict.fromkeys(t.name for b in made.blocks for t in b.tags))
        chosen = {EVERY: dict.fromkeys(tags, KEEP), "nothing kept": {}, "everything": {REST: KEEP}}
        chosen |= {f"not {t}": {u: KEEP for u in tags if u != t} for t in tags}
        wanted = {k: {label: v} for k, v in chosen.items() if not report.has(f"{name}, {k}")}
        # All are handed in before the first is waited for.
        futures = {
            k: backend.compile(*trace(build, Assignment(v), args)) for k, v in wanted.items()
        }
        for key, actions in wanted.items():
            seconds = futures[key].result().xla_seconds
            model = evaluate(made, actions).seconds
            report.add(f"{name}, {key}", {"xla_seconds": seconds, "model_seconds": model})


def summary(report: Report) -> dict:
    found = {}
    for name in CONFIGS:
        rows = {
            k.removeprefix(f"{name}, "): r
            for k, r in report.results.items()
            if k.startswith(f"{name}, ")
        }
        if EVERY not in rows:
            continue
        base = rows.pop(EVERY)
        of = lambda row, key, base=base: (row[key] - base[key]) / base["xla_seconds"]
        choices = {
            k: {"xla": of(r, "xla_seconds"), "model": of(r, "model_seconds")}
            for k, r in rows.items()
        }
        errors = {k: abs(c["model"] - c["xla"]) for k, c in choices.items()}
        found[name] = {
            "choices": choices,
            "median error": statistics.median(errors.values()),
            "largest error": max(errors.values()),
            "of": max(errors, key=lambda k: errors[k]),
        }
    return found


def main() -> None:
    Report("time_choices").for_each(CONFIGS, run, summary)


if __name__ == "__main__":
    main()
