"""Step time of gpt_nano on this CPU with its layers in jaxmem.stack, against jax.lax.scan +
jax.checkpoint, by plan.

    python -m benchmarks.stack_time [--rounds N]

Both loops of one plan run within a second or two of each other, in every round in another order.
The ratio is of the stack's time to the scan's, paired by round: its median and quartiles, by the
clock and by all cores' work.
"""

import jax
import numpy as np

from benchmarks.shared.case import local_profile, nano
from benchmarks.shared.results import Report
from benchmarks.shared.timing import cache_compiles, interleaved
from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import KEEP, Action, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solve import solve


def plans(config: Config) -> dict[str, Actions | None]:
    profile = local_profile(config)
    tags = [(b.name, t) for b in profile.blocks for t in b.tags]
    compress = {b.name: {} for b in profile.blocks}
    for block, tag in tags:
        choice = next((o.choice for o in tag.options if o.choice.action is Action.COMPRESS), None)
        if choice is not None:
            compress[block][tag.name] = choice
    keep = {b.name: {t.name: KEEP for t in b.tags} for b in profile.blocks}
    found = {
        "everything kept": None,
        "keep": keep,
        "recompute": {b.name: {} for b in profile.blocks},
        "compress": compress,
    }
    solution = solve(Problem(profile, room=evaluate(profile, keep).saved_bytes // 4))
    return found | ({"solved": solution.actions} if solution else {})


def main() -> None:
    report = Report("stack_time", rounds=25)
    cache_compiles()
    configs = {loop: nano(f"model.loop={loop}") for loop in ("scan", "stack")}
    groups = []
    for name, actions in plans(configs["scan"]).items():
        plan = None if actions is None else Assignment(actions)
        steps = {}
        for loop, config in configs.items():
            step = jax.jit(make_step(config, plan), donate_argnums=0)
            steps[f"{name} {loop}"] = step.lower(*abstract(config)).compile()
        groups.append(steps)
    both = interleaved(configs["scan"], groups, report.chosen["rounds"])
    for what, seconds in zip(("clock", "cores"), both):
        for group in groups:
            of_scan, of_stack = (np.asarray(seconds[name]) for name in group)
            name = next(iter(group)).removesuffix(" scan")
            row = report.results.setdefault(name, {})
            row[what] = quartiles((of_stack / of_scan).tolist())
    worst = max(r["cores"]["median"] for r in report.results.values())
    report.summarise({"largest median ratio of cores' work, stack to scan": worst})


if __name__ == "__main__":
    main()
