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
import warnings
from collections.abc import Callable

import jax

import jaxmem
from benchmarks.shared.results import Report, say
from benchmarks.shared.steps import of_config, of_others
from jaxmem._core.actions import KEEP, LOSSLESS, REST
from jaxmem._core.assignment import Assignment
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._planner.search.candidates import is_among
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.measure import hand_policies, quartiles
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.target import Target
from tests.shared.foreign import flax_models, libraries, plain

SHARES = {"everything": None, "0.6": 0.6, "0.4": 0.4}
CHOOSING, COMPARING = 8.0, 10.0  # seconds
WAYS = {"all actions": None, "lossless": LOSSLESS}


CASES: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    "gpt_nano": functools.partial(of_config, "gpt_nano"),
    "gemma, a scan": functools.partial(of_others, plain.gemma_in_a_scan),
    "encoder and decoder": functools.partial(of_others, plain.encoder_and_decoder),
    "Linen, nn.scan": functools.partial(
        of_others, functools.partial(flax_models.linen_transformer, scanned=True)
    ),
    "Equinox, a scan": functools.partial(
        of_others, functools.partial(libraries.equinox_transformer, scanned=True)
    ),
}


def policies(build: Callable, args: tuple, backend: Backend) -> dict:
    """The hand-written policies, compiled, by name."""
    steps = StepCompiler(build, args, backend)
    made = profile(steps.trace(Assignment.nothing()).jaxpr, backend, Allowed(LOSSLESS))
    steps.idle_blocks = made.idle_blocks
    wanted = {"everything kept": {b.name: {REST: KEEP} for b in made.blocks}} | hand_policies(made)
    return dict(zip(wanted, steps.compile(*wanted.values()), strict=True))


def compared(build: Callable, args: tuple, backend: Backend, hand: dict, budget: int, way) -> dict:
    plan = jaxmem.plan(build, *args, budget=budget, actions=way, measure=CHOOSING)
    fits = {n: s for n, s in hand.items() if s.compiled.total_bytes <= budget}
    steps = StepCompiler(build, args, backend)
    (own,) = steps.compile(plan.actions)
    named = {"plan": own} | fits
    rounds = dict(zip(named, steps.run(*named.values(), seconds=COMPARING), strict=True))
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
    keys = {(s, w): f"{name}, {s}, {w}" for s in SHARES for w in WAYS}
    if all(map(report.has, keys.values())):
        return
    build, args = CASES[name]()
    with backend_for(Target.parse("local")) as backend:
        hand = policies(build, args, backend)
        whole = hand["everything kept"].compiled.total_bytes
        for (share, way), key in keys.items():
            if report.has(key):
                continue
            factor = SHARES[share]
            budget = 10 * whole if factor is None else int(factor * whole)
            report.add(key, compared(build, args, backend, hand, budget, WAYS[way]))
    jax.clear_caches()


def summary(report: Report) -> dict:
    found = {}
    for way in WAYS:
        rows = {k: r for k, r in report.results.items() if k.endswith(way) and "ratios" in r}
        medians = [r["ratios"]["median"] for r in rows.values()]
        found[way] = {
            "points": len(rows),
            "geometric mean": statistics.geometric_mean(medians),
            "least": min(medians),
            # Where the plan is the policy itself, only noise is between them.
            "the plan is the policy": sum(r["is the policy"] for r in rows.values()),
            "slower beyond the quartiles": [
                k for k, r in rows.items() if r["ratios"]["upper"] < 1 and not r["is the policy"]
            ],
            "to everything kept": {
                k: r["medians"]["everything kept"] / r["medians"]["plan"]
                for k, r in rows.items()
                if "everything kept" in r["medians"]
            },
        }
    return found


def main() -> None:
    report = Report("measured")
    warnings.simplefilter("ignore")
    for name in CASES:
        say(name)
        run(report, name)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()
