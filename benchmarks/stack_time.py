"""Step time of gpt_nano on this CPU with its layers in jaxmem.stack, against jax.lax.scan +
jax.checkpoint, by plan.

    python -m benchmarks.stack_time [--rounds N]

Both loops of one plan run within a second or two of each other, in every round in another order.
The ratio is of the stack's time to the scan's, paired by round: its median and quartiles, by the
clock and by all cores' work.
"""

from benchmarks.shared.assignments import keep_tags, recomputed, solved, under
from benchmarks.shared.case import compile_planned, local_profile, nano
from benchmarks.shared.results import Report
from benchmarks.shared.timing import cache_compiles, interleaved, over
from experiments.config.text import Config
from jaxmem._core.actions import Action, Actions


def plans(config: Config) -> dict[str, Actions | None]:
    profile = local_profile(config)
    return {
        "everything kept": None,
        "keep": keep_tags(profile),
        "recompute": recomputed(profile),
        "compress": under(profile, Action.COMPRESS),
        "solved": solved(profile, 0.25),
    }


def main() -> None:
    report = Report("stack_time", rounds=25)
    cache_compiles()
    configs = {loop: nano(f"model.loop={loop}") for loop in ("scan", "stack")}
    chosen = plans(configs["scan"])
    groups = [
        {f"{name} {loop}": compile_planned(config, actions) for loop, config in configs.items()}
        for name, actions in chosen.items()
    ]
    both = interleaved(configs["scan"], groups, report.chosen["rounds"])
    report.results = {
        name: {
            what: over(seconds[f"{name} stack"], seconds[f"{name} scan"])
            for what, seconds in zip(("clock", "cores"), both)
        }
        for name in chosen
    }
    report.summarise(summary(report))


def summary(report: Report) -> dict:
    worst = max(r["cores"]["median"] for r in report.results.values())
    return {"largest median ratio of cores' work, stack to scan": worst}


if __name__ == "__main__":
    main()
