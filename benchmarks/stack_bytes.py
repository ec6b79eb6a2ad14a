"""Compiled bytes of a GPT's step with its layers in jaxmem.stack, beside jax.lax.scan +
jax.checkpoint, by plan.

    python -m benchmarks.stack_bytes

gpt_117m and gpt_345m, for h200 and for this machine's CPU: every tag under one action, everything
kept, a plan solved for, and (in the stack alone) that plan for the first half of the layers with
every tag kept in the other. Bytes are of the whole step, with host bytes beside them. No step is
run.
"""

import itertools

from benchmarks.shared.assignments import plans
from benchmarks.shared.case import AnyTimes, Case, on
from benchmarks.shared.results import Report
from jaxmem._core.actions import Actions
from jaxmem._core.groups import group_label

CASES = tuple(itertools.product(("gpt_117m", "gpt_345m"), ("h200", "local")))
CHOSEN = ("keep everything", "keep", "recompute", "compress", "offload", "solved 0.2")


def halves(first: Actions, last: Actions, layers: int) -> Actions:
    """Two groups of the one block's layers."""
    (a,), (b,) = first.values(), last.values()
    half = layers // 2
    return {group_label("block", 0, half): a, group_label("block", half, layers): b}


def measure(case: Case, actions: Actions | None) -> dict:
    compiled = case.compile(actions)[0].compiled
    return {
        "bytes": compiled.total_bytes,
        "host_bytes": compiled.host_bytes,
        "flops": compiled.matmul_flops,
    }


def both(scan: Case, stack: Case, actions: Actions | None) -> dict:
    found = {"scan": measure(scan, actions), "stack": measure(stack, actions)}
    return found | {"ratio": found["stack"]["bytes"] / found["scan"]["bytes"]}


def compare(report: Report, config: str, target: str) -> None:
    with on(target) as backend:
        of = lambda loop: Case(config, backend, AnyTimes(), [f"model.loop={loop}"])
        scan, stack = of("scan"), of("stack")
        found = plans(scan.profile, scan.config.model.width)
        two = halves(found["solved 0.2"], found["keep"], stack.config.model.layers)
        for name in CHOSEN:
            if name in found:
                actions = None if name == "keep everything" else found[name]
                report.once(f"{config} {target} {name}", both, scan, stack, actions)
        report.once(f"{config} {target} two groups", lambda: {"stack": measure(stack, two)})


def summary(report: Report) -> dict:
    ratios = {k: r["ratio"] for k, r in report.results.items() if "ratio" in r}
    return {"largest ratio": max(ratios.values()), "ratios": ratios}


def main() -> None:
    Report("stack_bytes").for_each(CASES, compare, summary)


if __name__ == "__main__":
    main()
