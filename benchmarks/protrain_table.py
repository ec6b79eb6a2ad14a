"""What plans choose where ProTrain's authors tell what it chose (spec P10): two GPTs, two batches,
four GPUs of two kinds.

    python -m benchmarks.protrain_table

Released steps of AdamA with one microbatch, in bfloat16 with float32 states, of sequences of 1024.
What layers do, where their states lie, and what is divided over the four devices, are planned
together, and the plan is compiled for GPUs that are not there. A host has 90 GiB for each of its
GPUs.

`recomputed` are layers that recompute all of their tags, `kept` those that keep everything, and
`offloaded` those that move a tensor to the host; `persist` are layers whose states stay on the
device. ProTrain's four numbers stand beside them.
"""

import time
from typing import Any

import jaxmem
from benchmarks.shared.released import LONG, NO_DROPOUT, OWN, planned_step
from benchmarks.shared.results import Report
from experiments.command.load import load
from jaxmem._core.actions import KEEP, RECOMPUTE, REST

# By row of the paper's table: model, batch, target; blocks that ProTrain checkpoints, of all;
# blocks that it swaps; chunks that persist, of all; buffers.
ROWS = {
    "A, RTX 3090": ("gpt_1b", 8, "rtx3090:4", "0/32, 0, 12/12, 0"),
    "A, A100": ("gpt_1b", 8, "a100-80gb:4", "0/32, 0, 12/12, 0"),
    "B": ("gpt_1b", 64, "rtx3090:4", "24/32, 2, 2/12, 3"),
    "C": ("gpt_1b", 64, "a100-80gb:4", "0/32, 0, 12/12, 0"),
    "D": ("gpt_10b", 8, "rtx3090:4", "48/48, 0, 3/49, 46"),
    "E": ("gpt_10b", 8, "a100-80gb:4", "0/48, 0, 15/49, 3"),
}


def planned(model: str, batch: int, target: str) -> jaxmem.Plan:
    size = f"train.batch={batch}", "train.microbatches=1"
    build, args = planned_step(load(model, [*OWN, *NO_DROPOUT, *LONG, *size]), axis="data")
    decide = "actions", "states", "sharding"
    return jaxmem.plan(build, *args, target=target, host_budget="90GiB", decide=decide)


def counts(plan: jaxmem.Plan) -> dict[str, int]:
    """How many layers do what."""
    places = plan.places
    assert places is not None
    found = {"recomputed": 0, "kept": 0, "offloaded": 0}
    for label, choices in plan.actions.items():
        if not label.startswith("block"):
            continue
        _, _, group = label.partition("[")
        start, stop = map(int, group[:-1].split(":")) if group else (0, places.layers)
        tags = [c.action.value for tag, c in choices.items() if tag != REST]
        found["recomputed"] += (stop - start) * all(a == RECOMPUTE.action.value for a in tags)
        found["kept"] += (stop - start) * (choices.get(REST) == KEEP)
        found["offloaded"] += (stop - start) * any("offload" in a for a in tags)
    return found


def row(name: str) -> dict:
    model, batch, target, protrain = ROWS[name]
    found: dict[str, Any] = {"model": model, "batch": batch, "target": target}
    start = time.perf_counter()
    try:
        plan = planned(model, batch, target)
    except jaxmem.errors.BudgetError as error:
        return found | {"error": str(error)}
    places = plan.places
    assert places is not None
    found |= {"protrain": protrain, "layers": places.layers} | counts(plan)
    found |= {name: getattr(places, name) for name in ("persist", "copies", "buffers", "streamed")}
    found |= {"divided": plan.divided, "compiled": plan.compiled_bytes, "host": plan.host_bytes}
    found |= {"seconds": plan.predicted_seconds, "compiles": plan.compiles}
    return found | {"planned in seconds": time.perf_counter() - start}


def summary(report: Report) -> dict:
    return {"rows": len(report.results)}


def main() -> None:
    Report("protrain_table").rows(ROWS, row, summary)


if __name__ == "__main__":
    main()
