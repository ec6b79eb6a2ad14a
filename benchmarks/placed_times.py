"""Do steps whose states lie in host memory take the time that their plans predict, on a CPU?

    python -m benchmarks.placed_times

gpt_nano, and one 4 times as wide, released, on the device at hand, planned within shares of the
bytes that all states and tensors take, each run beside the step without a plan, in turns.
`predicted` and `measured` are a plan's seconds over those of the plan for all memory, both as
predicted and as measured, and `absolute` is predicted over measured seconds: other work on the
machine only adds time, so that runs are compared by their fastest.
"""

import jax

import jaxmem
from benchmarks.shared.case import Case, nano, on
from benchmarks.shared.released import NO_DROPOUT, OWN
from benchmarks.shared.results import Report, of_errors
from benchmarks.shared.timing import in_turns
from experiments.steps.step import abstract, init_state

MODELS = {"gpt_nano": [], "gpt_nano, 4 times as wide": ["model.width=512", "train.batch=4"]}
SHARES = (1.0, 0.8, 0.6, 0.45)
ROUNDS = 11


def planned(case: Case) -> dict[float, jaxmem.Plan]:
    found: dict[float, jaxmem.Plan] = {}
    for share in SHARES:
        budget = None if share == 1.0 else int(share * found[1.0].compiled_bytes)
        try:
            found[share] = case.plan(budget, decide=("actions", "states"))
        except jaxmem.errors.BudgetError as error:
            print(f"{share}: {error}")
    return found


def timed(config, plans: dict[float, jaxmem.Plan]) -> dict[float, float]:
    """Seconds of the fastest step of each plan, of steps in turns."""
    _, batch = abstract(config)
    tokens = jax.numpy.zeros(batch.shape, batch.dtype)
    fresh = jax.jit(lambda: init_state(config))
    states = {str(share): plan.place(fresh()) for share, plan in plans.items()}
    steps = {str(share): plan.step for share, plan in plans.items()}
    seconds, _ = in_turns([steps], ROUNDS, states, {name: name for name in steps}, tokens)
    return {share: min(seconds[str(share)]) for share in plans}


def rows(model: str) -> dict:
    config = nano(*OWN, *NO_DROPOUT, "optimizer.clip=component", *MODELS[model])
    plans = planned(Case(config, on("local")))
    seconds, found = timed(config, plans), {}
    for share, plan in plans.items():
        predicted = plan.predicted_seconds / plans[1.0].predicted_seconds
        measured = seconds[share] / seconds[1.0]
        found[str(share)] = {
            "states": str(plan.places),
            "compiled": plan.compiled_bytes,
            "host": plan.host_bytes,
            "predicted": predicted,
            "measured": measured,
            "error": predicted / measured - 1,
            "absolute": plan.predicted_seconds / seconds[share],
        }
    return found


def summary(report: Report) -> dict:
    found = [r for rows in report.results.values() for s, r in rows.items() if s != "1.0"]
    return {"plans": len(found)} | of_errors(r["error"] for r in found)


def main() -> None:
    Report("placed_times").rows(MODELS, rows, summary)


if __name__ == "__main__":
    main()
