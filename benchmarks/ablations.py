"""What each phase of the search gains: plans with one phase switched off, at the same budgets.

    python -m benchmarks.ablations [RESULT ...]

`ablations`. The phases: local search near the least bytes, refinement by whole steps (which runs
where buffers are assigned before a compile is done: for TPUs), and groups of layers. The steps
train configs without a tag or a checkpoint, under `jaxmem.auto`, so that layers can be grouped.
Budgets: between the least that compiled and everything kept, most of them near the least. Every
plan is searched from nothing: no earlier compile is recalled, and times of pieces are the same.
Seconds are predicted; on a device that is not there they are XLA's estimate of the compiled step,
or the roofline of its fusions. A ratio is the variant's over the search's: above 1, the phase
gains.

`actions`: the mixed-integer program with keep and recompute, with one more action (compress, or
offload, which is all lossless actions), and with all actions, for shares of the bytes of all tags.
A number is the predicted step time divided by the time with all actions. Only pieces are compiled.

`corrections`: plans with `measure=` on this CPU, with and without the correction of prices by runs
of whole steps. Without it, no step by corrected prices runs, and no later plan reads the runs of
earlier searches. Each model has a cache folder, and its budgets are planned in order, so that a
budget's profile is corrected by the runs for the budgets before. "later" are plans without
`measure=` that follow: their prices are corrected by all runs so far, or are not. The steps of all
four plans then run in turns, in rounds that chose nothing. A ratio is all cores' work without the
correction over the work with it in the same round, above 1 if the correction gains; it is 1 if
both plans are the same assignment. `noise` is the ratio of two runs of one step in the same round.
"""

import itertools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.budgets import without_tags
from benchmarks.shared.assignments import ROOMS, solved
from benchmarks.shared.case import SCANNED, Case, Step, case_on, nano, on
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.searches import NO_HISTORY, own_cache, replacing
from benchmarks.shared.steps import MODELS, shapes, step_of
from benchmarks.shared.timing import cache_compiles, first_batch, in_turns, over
from experiments.steps.step import init_state
from jaxmem._core.actions import ALL, LOSSLESS, Action, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner import traced_step
from jaxmem._planner.search import baseline, candidates, least, search
from jaxmem._planner.search import measure as measured
from jaxmem._planner.search.candidates import alike
from jaxmem._planner.search.history import History
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compile.protocol import Backend
from tests.shared.foreign.size import Size

# Config, target and the allowed actions; "default" is what a plan may use without a request.
CASES = (
    ("gpt_nano", "local", "default"),
    ("gpt_117m", "h200", "default"),
    ("gpt_117m", "h200", "keep,recompute"),
    ("gpt_117m", "v5e", "default"),
)
# Budgets by target: the share of the bytes between the least and everything kept.
SHARES = {
    "local": (0.002, 0.03, 0.07, 0.2),
    "h200": (0.002, 0.03, 0.06, 0.085, 0.1, 0.11, 0.2),
    "v5e": (0.002, 0.03, 0.07),
}
WORTH = 0.01

PHASES: dict[str, tuple] = {  # parts of the search, as `replacing` takes them
    "nothing": (),
    "local search": (
        (candidates, "_descended", lambda *args: None),
        (baseline, "local_search", lambda *args: None),
        (least, "local_search", lambda *args: None),
    ),
    "whole steps": ((search, "refine_by_whole_steps", lambda search: {}),),
    "groups": ((search, "divide", lambda search, best, step_time: (best, None)),),
}


def in_full(phase: str, measure: Callable, **given) -> dict:
    """What `measure(**given)` finds by searches without one phase, that recall nothing."""
    recalled = History, "recall_least", lambda *args, **given: None
    with replacing(NO_HISTORY, recalled, *PHASES[phase]):
        return measure(**given)


def run(report: Report, config: str, target: str, allowed: str) -> None:
    name, actions = f"{config} {target} {allowed}", None if allowed == "default" else allowed
    with case_on(target, config, *SCANNED) as tagged:
        case, backend = without_tags(tagged), tagged.backend
        ends = report.once(f"{name} ends", in_full, "nothing", case.ends, actions=actions)
        phases = [p for p in PHASES if p != "whole steps" or backend.stops_at_buffers]
        for share, phase in itertools.product(SHARES[target], phases):
            nbytes = ends["least"] + share * (ends["everything"] - ends["least"])
            budget = case.budget_for(int(nbytes))
            given = {"budget": budget, "actions": actions}
            report.once(f"{name} {share} without {phase}", in_full, phase, case.row, **given)


def of_phase(report: Report, name: str, phase: str) -> dict:
    """By what share plans take longer without a phase, and where no plan is found without it."""
    ratios, lost = [], []
    for share in SHARES[name.split()[1]]:
        own, other = (report[f"{name} {share} without {p}"] for p in ("nothing", phase))
        if own["found"] and other["found"]:
            ratios.append(other["predicted_seconds"] / own["predicted_seconds"])
        elif own["found"]:
            lost.append(share)
    return {
        "time ratios": ratios,
        "mean ratio": statistics.fmean(ratios) if ratios else None,
        "budgets refused without it": lost,
        "worth it": bool(lost) or (bool(ratios) and max(ratios) > 1 + WORTH),
    }


def of_case(report: Report, name: str) -> dict:
    """The gain of each phase that ran for the case."""
    ran = [p for p in PHASES if p != "nothing" and report.has(f"{name} 0.002 without {p}")]
    return {p: of_phase(report, name, p) for p in ran}


# -- actions

SETS = {
    "recompute": (Action.KEEP, Action.RECOMPUTE),
    "compress": (Action.KEEP, Action.RECOMPUTE, Action.COMPRESS),
    "offload": LOSSLESS,
    "all": ALL,
}


def alone(config: str, target: str) -> dict[str, dict[str, float | None]]:
    """By share of the bytes: the step time under each set of actions over the time under all. None
    if no assignment is within the share.
    """
    found: dict[str, dict[str, float | None]] = {}
    with on(target) as backend:
        cases = {name: Case(config, backend, allowed=given) for name, given in SETS.items()}
        for share in ROOMS:
            times = {}
            for name, case in cases.items():
                if (actions := solved(case.profile, share)) is not None:
                    times[name] = seconds_under(case.profile, actions)
            found[f"{share}"] = {n: times[n] / times["all"] if n in times else None for n in SETS}
    return found


def seconds_under(profile: Profile, actions: Actions) -> float:
    """The predicted seconds of the blocks of a step."""
    kept = evaluate(profile, profile.everything_kept).seconds
    return profile.step_seconds + evaluate(profile, actions).seconds - kept


def of_alone(report: Report) -> dict[str, float | None]:
    """The largest ratio of each set of actions; None if a share is too small for it somewhere."""
    rows = [row for shares in report.results.values() for row in shares.values()]
    of = lambda name: [row[name] for row in rows]
    return {n: None if None in of(n) else max(of(n)) for n in SETS}


# -- corrections

GPT = "model.layers=4", "model.width=96", "train.sequence=128", "train.batch=4"
SIZE = Size(width=96, heads=4, layers=4, batch=4, sequence=128, vocab=256)
NAMES = "gpt_nano, smaller", "Linen, nn.scan", "gemma, a scan"
WAYS = {"all actions": None, "lossless": LOSSLESS}
OF_EVERYTHING = 0.7, 0.5  # budgets: the share of the bytes of everything kept
CHOOSING, ROUNDS = 4.0, 40  # seconds, rounds
UNCORRECTED = (
    (measured, "CORRECTIONS", 0),
    (measured, "_remember", lambda search, runs: None),
    (traced_step, "corrected_by_runs", lambda profile, history: (profile, ())),
)


def small_step(name: str, backend: Backend) -> tuple[Step, tuple]:
    """A model's step, and its arguments."""
    if name in MODELS:
        loss, *args = MODELS[name](SIZE)
        args = args[0], *args[1]
        return Step(jaxmem.auto(step_of(loss)), shapes(args), backend), args
    case = Case(nano(*GPT), backend)
    return case, (init_state(case.config), first_batch(case.config))


def compared(step: Step, args: tuple, budget: int, way) -> dict:
    plans = {}
    for when, seconds in (("", CHOOSING), ("later ", None)):
        for how, patches in (("without", UNCORRECTED), ("with", ())):
            with replacing(NO_HISTORY, *patches):
                plans[when + how] = step.plan(budget, actions=way, measure=seconds)
    # A model's step may take more arguments than a batch.
    run = lambda step: lambda state, others: step(state, *others)
    steps = {name: run(plan.step) for name, plan in plans.items()}
    steps["again"] = steps["without"]
    states = {name: jax.tree.map(jnp.copy, args[0]) for name in steps}
    _, cores = in_turns([steps], ROUNDS, states, args[1:])
    row = {
        "budget": budget,
        "noise": over(cores["again"], cores["without"]),
        "ran": {name: [o.name for o in plan.measured] for name, plan in plans.items()},
    }
    for when in ("", "later "):
        own, other = f"{when}with", f"{when}without"
        row[f"{when}same plan"] = alike(plans[own].actions, plans[other].actions)
        row[f"{when}ratio"] = over(cores[other], cores[own])
    return row


def of_model(report: Report, name: str) -> None:
    cache_compiles()
    with own_cache(), on("local") as backend:
        step, args = small_step(name, backend)
        whole = step.whole_plan().baseline_bytes
        for way, share in itertools.product(WAYS, OF_EVERYTHING):
            budget = int(share * whole)
            report.once(f"{name}, {way}, {share}", compared, step, args, budget, WAYS[way])
    jax.clear_caches()


def of_corrections(report: Report) -> dict:
    rows = [*report.results.values()]
    runs = lambda how: statistics.fmean(len(r["ran"][how]) for r in rows)
    return {
        "budgets": len(rows),
        "noise": statistics.median(abs(r["noise"]["median"] - 1) for r in rows),
        "steps run": {how: runs(how) for how in ("with", "without")},
    }


RESULTS = {
    "ablations": Benchmark(CASES, run, of_case=of_case),
    "actions": Benchmark(
        [(config, target) for config in ("gpt_117m", "gpt_345m") for target in ("h200", "v5e")],
        row=alone,
        summary=of_alone,
    ),
    "corrections": Benchmark(NAMES, of_model, of_corrections),
}

if __name__ == "__main__":
    measure("ablations", RESULTS)
