"""jaxmem.stack against jax.lax.scan + jax.checkpoint, by plan: bytes and step time.

    python -m benchmarks.stack [RESULT ...]

`stack_bytes`: compiled bytes of gpt_117m's and gpt_345m's whole step, and its host bytes, for h200
and for this machine's CPU: every tag under one action, everything kept, a solved plan, and (in the
stack alone) the solved plan for the first half of the layers with every tag kept in the other half.
No step runs.

`stack_time`: step time of gpt_nano on this CPU. Both loops of one plan run within a second or two
of each other, in every round in another order. The ratio is the stack's time over the scan's,
paired by round: median and quartiles, by the clock and by all cores' work.
"""

import itertools

from benchmarks.shared.assignments import keep_tags, plans, recomputed, solved, under
from benchmarks.shared.case import AnyTimes, Case, compile_planned, local_profile, nano, on
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.timing import cache_compiles, clock_and_cores, interleaved
from jaxmem._core.actions import Action, Actions
from jaxmem._core.groups import group_label

LOOPS = "scan", "stack"

# -- stack_bytes

CHOSEN = ("keep everything", "keep", "recompute", "compress", "offload", "solved 0.2")


def halves(first: Actions, last: Actions, layers: int) -> Actions:
    """Two groups of the one block's layers."""
    (a,), (b,) = first.values(), last.values()
    half = layers // 2
    return {group_label("block", 0, half): a, group_label("block", half, layers): b}


def sizes(case: Case, actions: Actions | None) -> dict:
    compiled = case.compile(actions)[0].compiled
    return {
        "bytes": compiled.total_bytes,
        "host_bytes": compiled.host_bytes,
        "flops": compiled.matmul_flops,
    }


def both(scan: Case, stack: Case, actions: Actions | None) -> dict:
    found = {"scan": sizes(scan, actions), "stack": sizes(stack, actions)}
    return found | {"ratio": found["stack"]["bytes"] / found["scan"]["bytes"]}


def compare(report: Report, config: str, target: str) -> None:
    with on(target) as backend:
        scan, stack = (Case(config, backend, AnyTimes(), [f"model.loop={loop}"]) for loop in LOOPS)
        found = plans(scan.profile, scan.config.model.width)
        two = halves(found["solved 0.2"], found["keep"], stack.config.model.layers)
        for name in CHOSEN:
            if name in found:
                actions = None if name == "keep everything" else found[name]
                report.once(f"{config} {target} {name}", both, scan, stack, actions)
        report.once(f"{config} {target} two groups", lambda: {"stack": sizes(stack, two)})


def of_bytes(report: Report) -> dict:
    ratios = {k: r["ratio"] for k, r in report.results.items() if "ratio" in r}
    return {"largest ratio": max(ratios.values()), "ratios": ratios}


# -- stack_time

ROUNDS = 25


def run(report: Report) -> None:
    cache_compiles()
    configs = {loop: nano(f"model.loop={loop}") for loop in LOOPS}
    profile = local_profile(configs["scan"])
    chosen: dict[str, Actions | None] = {
        "everything kept": None,
        "keep": keep_tags(profile),
        "recompute": recomputed(profile),
        "compress": under(profile, Action.COMPRESS),
        "solved": solved(profile, 0.25),
    }
    groups = [
        {f"{name} {loop}": compile_planned(config, actions) for loop, config in configs.items()}
        for name, actions in chosen.items()
    ]
    seconds = interleaved(configs["scan"], groups, ROUNDS)
    report.results = {
        name: clock_and_cores(seconds, f"{name} stack", f"{name} scan") for name in chosen
    }


def of_time(report: Report) -> dict:
    worst = max(r["cores"]["median"] for r in report.results.values())
    return {"largest median ratio of cores' work, stack to scan": worst}


RESULTS = {
    "stack_bytes": Benchmark(
        itertools.product(("gpt_117m", "gpt_345m"), ("h200", "local")), compare, of_bytes
    ),
    "stack_time": Benchmark(run=run, summary=of_time),
}

if __name__ == "__main__":
    measure("stack", RESULTS)
