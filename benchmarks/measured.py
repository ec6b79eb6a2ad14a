"""Does `measure=` return a step that no policy written by hand beats at the same budget?

    python -m benchmarks.measured

Models of ours and of others are planned on the CPU at hand with `jaxmem.plan(..., measure=8)`: with
room for everything, and for 0.6 and 0.4 of its bytes, with all actions and with lossless ones. The
plan's step and those of the policies that fit (everything kept, nothing kept, products kept, every
tag kept) are then run in turns again, in rounds that chose nothing. `ratios` are those of the
fastest policy's time, by its median, to the plan's, round by round: above 1 the plan is faster.
"""

import functools
import statistics
from collections.abc import Callable

import jax

from benchmarks.shared.case import Step, on
from benchmarks.shared.results import Report, say
from benchmarks.shared.steps import of_config, of_others
from jaxmem._core.actions import LOSSLESS
from jaxmem._planner.search.candidates import is_among
from jaxmem._planner.search.measure import hand_policies, quartiles
from tests.shared.foreign import flax_models, libraries, plain

SHARES = {"everything": 10, "0.6": 0.6, "0.4": 0.4}  # of the bytes of everything kept
CHOOSING, COMPARING = 8.0, 10.0  # seconds
WAYS = {"all actions": None, "lossless": LOSSLESS}
scanned = functools.partial(functools.partial, scanned=True)


CASES: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    "gpt_nano": functools.partial(of_config, "gpt_nano"),
    "gemma, a scan": functools.partial(of_others, plain.gemma_in_a_scan),
    "encoder and decoder": functools.partial(of_others, plain.encoder_and_decoder),
    "Linen, nn.scan": functools.partial(of_others, scanned(flax_models.linen_transformer)),
    "Equinox, a scan": functools.partial(of_others, scanned(libraries.equinox_transformer)),
}


def policies(step: Step) -> dict:
    """The hand-written policies, compiled, by name."""
    made = step.profile
    wanted = {"everything kept": made.everything_kept} | hand_policies(made)
    return dict(zip(wanted, step.steps.compile(*wanted.values()), strict=True))


def compared(step: Step, hand: dict, budget: int, way) -> dict:
    plan = step.plan(budget, actions=way, measure=CHOOSING)
    fits = {n: s for n, s in hand.items() if s.compiled.total_bytes <= budget}
    (own,) = step.steps.compile(plan.actions)
    named = {"plan": own} | fits
    rounds = dict(zip(named, step.steps.run(*named.values(), seconds=COMPARING), strict=True))
    best = min(fits, key=lambda name: statistics.median(rounds[name]), default=None)
    row = {
        "budget": budget,
        "plan_bytes": plan.compiled_bytes,
        "chosen": next(one.name for one in plan.measured if one.chosen),
        "best policy": best,
        "rounds": len(rounds["plan"]),
        "medians": {name: statistics.median(r) for name, r in rounds.items()},
    }
    if best is not None:
        row["is the policy"] = is_among(plan.actions, [fits[best]])
        apart = [b / p for b, p in zip(rounds[best], rounds["plan"], strict=True)]
        row["ratios"] = dict(zip(("lower", "median", "upper"), quartiles(apart), strict=True))
    return row


def run(report: Report, name: str) -> None:
    say(name)
    keys = {(s, w): f"{name}, {s}, {w}" for s in SHARES for w in WAYS}
    if all(map(report.has, keys.values())):
        return
    with on("local") as backend:
        step = Step(*CASES[name](), backend, allowed=LOSSLESS)
        hand = policies(step)
        whole = hand["everything kept"].compiled.total_bytes
        for (share, way), key in keys.items():
            report.once(key, compared, step, hand, int(SHARES[share] * whole), WAYS[way])
    jax.clear_caches()


def of_way(report: Report, way: str) -> dict:
    rows = {k: r for k, r in report.results.items() if k.endswith(way) and "ratios" in r}
    medians = [r["ratios"]["median"] for r in rows.values()]
    kept = {k: r["medians"] for k, r in rows.items() if "everything kept" in r["medians"]}
    return {
        "points": len(rows),
        "geometric mean": statistics.geometric_mean(medians),
        "least": min(medians),
        # Where the plan is the policy itself, only noise is between them.
        "the plan is the policy": sum(r["is the policy"] for r in rows.values()),
        "slower beyond the quartiles": [
            k for k, r in rows.items() if r["ratios"]["upper"] < 1 and not r["is the policy"]
        ],
        "to everything kept": {k: m["everything kept"] / m["plan"] for k, m in kept.items()},
    }


def summary(report: Report) -> dict:
    return {way: of_way(report, way) for way in WAYS}


def main() -> None:
    Report("measured").for_each(CASES, run, summary)


if __name__ == "__main__":
    main()
