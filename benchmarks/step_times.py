"""Is the time that plans are predicted to take the time that they take? On the CPU at hand.

    python -m benchmarks.step_times

Three steps: our gpt_nano, and a BERT and a ViT of Hugging Face Transformers under `jaxmem.auto`, on
which no constant of the cost model was fitted. Of each twenty plans or more are compiled:
everything kept, every tag kept, recomputed or compressed, the planner's own for shares of the bytes
of all tags, with all actions and with lossless ones, and random ones. They then run in turns.

`measured` is the median over rounds of a step's seconds over those of the same round's step with
everything kept. `predicted` is what a plan says: the least seconds of that step, and what the
profile says the plan costs more or less, over the former. (Pieces are timed by the least of several
runs too.) `error` is predicted over measured, less 1.
"""

import functools
import itertools
import random
import statistics
from collections.abc import Callable

import jax

from benchmarks.shared.assignments import different, drawn, solved, under
from benchmarks.shared.case import Step, on
from benchmarks.shared.results import Report, of_errors, say, spearman
from benchmarks.shared.steps import of_config, of_others
from jaxmem._core.actions import Action, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import Problem
from tests.shared.foreign import libraries

SHARES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05)  # of the bytes of all tags
RANDOM = 14
SECONDS = 100.0  # that one step's plans run in turns
BASE = "everything kept"


CASES: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    "gpt_nano": functools.partial(of_config, "gpt_nano"),
    "BERT": functools.partial(of_others, libraries.bert),
    "ViT": functools.partial(of_others, libraries.vit),
}


def plans(made: Profile) -> dict[str, Actions]:
    """Assignments that differ, by name; everything kept first."""
    choices = Problem(made).open_choices()
    found = {a.value: under(made, a) for a in (Action.KEEP, Action.RECOMPUTE, Action.COMPRESS)}
    lossy = frozenset((*key, c) for key, cs in choices.items() for c in cs if c.action.compresses)
    for share in SHARES:
        for name, refused in (("solved", frozenset()), ("lossless", lossy)):
            actions = solved(made, share, refused=refused)
            if actions is not None:
                found[f"{name} {share}"] = actions
    rng = random.Random(0)
    lossless = lambda open_: rng.choice([c for c in open_ if not c.action.compresses])
    for i in range(RANDOM):
        found[f"random {i}"] = drawn(made, rng.choice if i % 2 else lossless)
    return {BASE: made.everything_kept} | different(made, found)


def run(report: Report, name: str) -> None:
    if report.has(f"{name}, {BASE}"):
        return
    with on("local") as backend:
        step = Step(*CASES[name](), backend, backend.database)
        made, steps = step.profile, step.steps
        chosen = plans(made)
        say(f"{name}: {len(chosen)} plans are compiled")
        compiled = steps.compile(*chosen.values())
        say(f"{name}: they run for {SECONDS:.0f} s")
        rounds = dict(zip(chosen, steps.run(*compiled, seconds=SECONDS), strict=True))
    base = rounds[BASE]
    least, kept = min(base), evaluate(made, made.everything_kept).seconds
    for plan, one in zip(chosen, compiled, strict=True):
        apart = [s / b for s, b in zip(rounds[plan], base, strict=True)]
        predicted = 1 + (evaluate(made, one.actions).seconds - kept) / least
        measured = statistics.median(apart)
        row = {
            "predicted": predicted,
            "measured": measured,
            "quartiles": statistics.quantiles(apart, n=4)[::2],
            "error": predicted / measured - 1,
            "rounds": len(apart),
            "seconds": {"median": statistics.median(rounds[plan]), "least": min(rounds[plan])},
            "lossy": any(c.action.compresses for t in one.actions.values() for c in t.values()),
            "compiled_bytes": one.compiled.total_bytes,
        }
        report.add(f"{name}, {plan}", row)
    jax.clear_caches()


def of_rows(rows: list[dict]) -> dict:
    rank = spearman([r["predicted"] for r in rows], [r["measured"] for r in rows])
    return {"plans": len(rows), "Spearman": rank} | of_errors(r["error"] for r in rows)


def summary(report: Report) -> dict:
    # What everything is compared with is no plan.
    of = lambda name: [r for k, r in report.under(f"{name}, ").items() if k != BASE]
    rows = {name: of(name) for name in CASES}
    return {name: of_rows(rows[name]) for name in CASES} | {
        "all": of_rows([*itertools.chain(*rows.values())])
    }


def main() -> None:
    Report("step_times").for_each(CASES, run, summary)


if __name__ == "__main__":
    main()
