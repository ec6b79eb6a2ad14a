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
import random
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import jax
from scipy.stats import spearmanr

from benchmarks.shared.results import Report, say
from benchmarks.shared.steps import of_config, of_others
from jaxmem._core.actions import ALL, RECOMPUTE, Action, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.solve.cost import effective, evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solve import solve
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.support import allowed_actions
from jaxmem._target.devices.target import Target
from tests.shared.foreign import libraries

SHARES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05)  # of the bytes of all tags
RANDOM = 14
SECONDS = 100.0  # that one step's plans run in turns


CASES: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    "gpt_nano": functools.partial(of_config, "gpt_nano"),
    "BERT": functools.partial(of_others, libraries.bert),
    "ViT": functools.partial(of_others, libraries.vit),
}


def plans(made: Profile) -> dict[str, Actions]:
    """Assignments that differ, by name; everything kept first."""
    choices = Problem(made).open_choices()
    every = lambda action: {
        b.name: {
            t: next((c for c in choices[b.name, t] if c.action is action), RECOMPUTE)
            for (label, t) in choices
            if label == b.name
        }
        for b in made.blocks
    }
    found = {"everything kept": made.everything_kept}
    found |= {a.value: every(a) for a in (Action.KEEP, Action.RECOMPUTE, Action.COMPRESS)}
    most = evaluate(made, every(Action.KEEP)).saved_bytes
    lossy = frozenset((*key, c) for key, cs in choices.items() for c in cs if c.action.compresses)
    for share in SHARES:
        for name, refused in (("solved", frozenset()), ("lossless", lossy)):
            solution = solve(Problem(made, room=int(share * most), refused=refused))
            if solution is not None:
                found[f"{name} {share}"] = solution.actions
    rng = random.Random(0)
    for i in range(RANDOM):
        drawn: Actions = {b.name: {} for b in made.blocks}
        for (block, tag), open_ in choices.items():
            drawn[block][tag] = rng.choice([c for c in open_ if i % 2 or not c.action.compresses])
        found[f"random {i}"] = drawn
    unique: dict[str, str] = {}
    for name, actions in found.items():
        key = name if actions is made.everything_kept else repr(effective(made, actions))
        unique.setdefault(key, name)
    return {name: found[name] for name in unique.values()}


def run(report: Report, name: str) -> None:
    build, args = CASES[name]()
    with backend_for(Target.parse("local")) as backend:
        steps = StepCompiler(build, args, backend)
        here, _ = allowed_actions(ALL, backend.target)
        jaxpr = steps.trace(Assignment.nothing()).jaxpr
        made = profile(jaxpr, backend, Allowed(here), database=backend.database)
        steps.idle_blocks = made.idle_blocks
        chosen = plans(made)
        say(f"{name}: {len(chosen)} plans are compiled")
        compiled = steps.compile(*chosen.values())
        say(f"{name}: they run for {SECONDS:.0f} s")
        rounds = dict(zip(chosen, steps.run(*compiled, seconds=SECONDS), strict=True))
    base = rounds["everything kept"]
    least, kept = min(base), evaluate(made, made.everything_kept).seconds
    for plan, step in zip(chosen, compiled, strict=True):
        apart = [s / b for s, b in zip(rounds[plan], base, strict=True)]
        predicted = 1 + (evaluate(made, step.actions).seconds - kept) / least
        measured = statistics.median(apart)
        row = {
            "predicted": predicted,
            "measured": measured,
            "quartiles": statistics.quantiles(apart, n=4)[::2],
            "error": predicted / measured - 1,
            "rounds": len(apart),
            "seconds": {"median": statistics.median(rounds[plan]), "least": min(rounds[plan])},
            "lossy": any(c.action.compresses for t in step.actions.values() for c in t.values()),
            "compiled_bytes": step.compiled.total_bytes,
        }
        report.add(f"{name}, {plan}", row)
    jax.clear_caches()


def of_rows(rows: list[dict]) -> dict:
    errors = sorted(abs(r["error"]) for r in rows)
    told, seen = [r["predicted"] for r in rows], [r["measured"] for r in rows]
    rank: Any = spearmanr(told, seen)
    return {
        "plans": len(rows),
        "median error": statistics.median(errors),
        "90 % are within": errors[int(0.9 * (len(errors) - 1))],
        "worst": errors[-1],
        "Spearman": float(rank.statistic),
        "median, with its sign": statistics.median(r["error"] for r in rows),
    }


def summary(report: Report) -> dict:
    # What everything is compared with is no plan.
    rows = {k: r for k, r in report.results.items() if not k.endswith(", everything kept")}
    of = lambda name: [r for k, r in rows.items() if k.startswith(f"{name}, ")]
    done = [name for name in CASES if of(name)]
    return {name: of_rows(of(name)) for name in done} | {"all": of_rows(list(rows.values()))}


def main() -> None:
    report = Report("step_times")
    warnings.simplefilter("ignore")
    for name in CASES:
        if not report.has(f"{name}, everything kept"):
            run(report, name)
            report.summarise(summary(report))


if __name__ == "__main__":
    main()
