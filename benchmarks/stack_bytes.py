"""Compiled bytes of a GPT's step with its layers in jaxmem.stack, beside jax.lax.scan +
jax.checkpoint, by plan.

    python -m benchmarks.stack_bytes

gpt_117m and gpt_345m, for h200 and for this machine's CPU: every tag under one action, everything
kept, a plan solved for, and (in the stack alone) that plan for the first half of the layers with
every tag kept in the other. Bytes are of the whole step, with host bytes beside them. No step is
run.
"""

from benchmarks.shared.case import AnyTimes, Case
from benchmarks.shared.plans import plans
from benchmarks.shared.results import Report
from jaxmem._core.actions import Actions
from jaxmem._core.groups import group_label
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target

CONFIGS, TARGETS = ("gpt_117m", "gpt_345m"), ("h200", "local")
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


def compare(report: Report, config: str, target: str) -> None:
    with backend_for(Target.parse(target)) as backend:
        of = lambda loop: Case(config, backend, AnyTimes(), [f"model.loop={loop}"])
        scan, stack = of("scan"), of("stack")
        found = plans(scan)
        for name in CHOSEN:
            if name in found and not report.has(key := f"{config} {target} {name}"):
                actions = None if name == "keep everything" else found[name]
                of_scan, of_stack = measure(scan, actions), measure(stack, actions)
                report.add(
                    key,
                    {
                        "scan": of_scan,
                        "stack": of_stack,
                        "ratio": of_stack["bytes"] / of_scan["bytes"],
                    },
                )
        if not report.has(key := f"{config} {target} two groups"):
            two = measure(
                stack, halves(found["solved 0.2"], found["keep"], stack.config.model.layers)
            )
            report.add(key, {"stack": two})


def main() -> None:
    report = Report("stack_bytes")
    for config in CONFIGS:
        for target in TARGETS:
            compare(report, config, target)
    ratios = {k: r["ratio"] for k, r in report.results.items() if "ratio" in r}
    report.summarise({"largest ratio": max(ratios.values()), "ratios": ratios})


if __name__ == "__main__":
    main()
