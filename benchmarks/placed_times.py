"""Do steps whose states lie in host memory take the time that their plans predict, on a CPU?

    python -m benchmarks.placed_times

gpt_nano, and one 4 times as wide, released, on the device at hand, planned within shares of the
bytes that all states and tensors take, each run beside the step without a plan, in turns.
`predicted` and `measured` are a plan's seconds over those of the plan for all memory, both as
predicted and as measured, and `absolute` is predicted over measured seconds: other work on the
machine only adds time, so that runs are compared by their fastest.
"""

import statistics
import time
import warnings
from typing import Any

import jax

import jaxmem
from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.steps.step import abstract, init_state, make_step

OWN = ["model.loop=stack", "optimizer.accumulation=released", "optimizer.clip=component"]
OWN += ["plan.budget=none", "model.dropout=0", "model.attention_dropout=0"]
MODELS = {"gpt_nano": [], "gpt_nano, 4 times as wide": ["model.width=512", "train.batch=4"]}
SHARES = (1.0, 0.8, 0.6, 0.45)
ROUNDS = 12


def planned(config) -> dict[float, jaxmem.Plan]:
    build, args = lambda plan: make_step(config, plan), abstract(config)
    found: dict[float, jaxmem.Plan] = {}
    for share in SHARES:
        budget = None if share == 1.0 else int(share * found[1.0].compiled_bytes)
        try:
            found[share] = jaxmem.plan(build, *args, budget=budget, decide=("actions", "states"))
        except jaxmem.errors.BudgetError as error:
            print(f"{share}: {error}")
    return found


def timed(config, plans: dict[float, jaxmem.Plan]) -> dict[float, float]:
    """Seconds of the fastest step of each plan, of steps in turns."""
    _, batch = abstract(config)
    tokens = jax.numpy.zeros(batch.shape, batch.dtype)
    fresh = lambda: jax.jit(lambda: init_state(config))()
    states = {share: plan.place(fresh()) for share, plan in plans.items()}
    rounds: dict[float, list[float]] = {share: [] for share in plans}
    for _ in range(ROUNDS):
        for share, plan in plans.items():
            start = time.perf_counter()
            states[share], metrics = plan.step(states[share], tokens)
            jax.block_until_ready((states[share], metrics))
            rounds[share].append(time.perf_counter() - start)
    return {share: min(seconds[1:]) for share, seconds in rounds.items()}


def run(report: Report, model: str) -> None:
    if report.has(model):
        return
    config = load("gpt_nano", [*OWN, *MODELS[model]])
    plans = planned(config)
    seconds = timed(config, plans)
    rows: dict[str, Any] = {}
    for share, plan in plans.items():
        predicted = plan.predicted_seconds / plans[1.0].predicted_seconds
        measured = seconds[share] / seconds[1.0]
        rows[str(share)] = {
            "states": str(plan.places),
            "compiled": plan.compiled_bytes,
            "host": plan.host_bytes,
            "predicted": predicted,
            "measured": measured,
            "error": predicted / measured - 1,
            "absolute": plan.predicted_seconds / seconds[share],
        }
    report.add(model, rows)


def summary(report: Report) -> dict:
    rows = [r for found in report.results.values() for s, r in found.items() if s != "1.0"]
    errors = sorted(abs(r["error"]) for r in rows)
    return {"plans": len(rows), "median error": statistics.median(errors), "worst": errors[-1]}


def main() -> None:
    report = Report("placed_times")
    warnings.simplefilter("ignore")
    for model in MODELS:
        run(report, model)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()
