"""Predicted step times against measured ones, and the time of a call of `jaxmem.jit`, on this CPU.

    python -m benchmarks.times [RESULT ...]

`step_times`: is the predicted time of a plan the measured time? Three steps: our gpt_nano, and a
BERT and a ViT of Hugging Face Transformers under `jaxmem.auto`, on which no constant of the cost
model was fitted. Twenty plans or more are compiled for each: everything kept, every tag kept,
recomputed or compressed, hand-written policies where the model has their tags, solved plans for
shares of the bytes of all tags, with all actions and with lossless ones, greedy plans, and random
ones. They then run in turns. `measured` is the median, over rounds, of the ratio of a step's
seconds to the seconds of the step with everything kept in the same round. `predicted` is the plan's
ratio: the least seconds of the step with everything kept, plus the profile's difference for the
plan, divided by the least seconds. (Pieces are timed by the least of several runs too.) `error` is
predicted over measured, less 1. `Spearman` is the correlation of the ranks.

`placed_times`: do steps whose states are in host memory take the time that their plans predict?
gpt_nano, and one 4 times as wide, released, planned within shares of the bytes that all states and
tensors take. Each plan runs in turns with the step without a plan. `predicted` and `measured` are a
plan's seconds divided by the seconds of the plan for all memory, and `absolute` is the predicted
seconds divided by the measured seconds. Other work on the machine only adds time, so that runs are
compared by their fastest.

`time_spread`: does the spread of a piece's runs show that the machine was busy, and how wrong are
its times? The pieces of gpt_nano's step are measured in sessions: at the same time as whatever else
the machine does, and before all of it, by Linux's real-time scheduling, which takes the rights of
an administrator. A time's error is its excess over the least that any session gave. Run it on a
busy machine.

`jit_calls`: seconds of a call, in turns with `jax.jit`, of a step with so many arrays in its state.
The arrays are small, so that the call itself is most of the time. `more` is the difference of the
least times, in microseconds.
"""

import itertools
import os
import pathlib
import random
import statistics
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from scipy.stats import spearmanr

import jaxmem
from benchmarks.shared.assignments import baselines, different, drawn, solved, under
from benchmarks.shared.case import Case, Step, nano, on
from benchmarks.shared.released import NO_DROPOUT, OWN
from benchmarks.shared.results import Benchmark, Report, measure, of_errors, say
from benchmarks.shared.steps import local_step, step_of
from benchmarks.shared.timing import first_batch, in_turns
from experiments.steps.step import init_state
from jaxmem._core.actions import Action, Actions
from jaxmem._core.database import Database, Timing
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.timing import measure as time_piece
from jaxmem._target.devices.target import Target
from jaxmem._trace.job import Job
from tests.shared.greedy import greedy

# -- step_times

SHARES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05)  # of the bytes of all tags
GREEDY = (0.7, 0.5, 0.35)
RANDOM = 14
SECONDS = 100.0  # that one step's plans run in turns
BASE = "everything kept"

CASES = {"gpt_nano": "gpt_nano", "BERT": "Transformers, BERT", "ViT": "Transformers, ViT"}


def plans(made: Profile) -> dict[str, Actions]:
    """Assignments that differ, by name; everything kept first."""
    choices = ActionProblem(made).open_choices()
    found: dict = {
        a.value: under(made, a) for a in (Action.KEEP, Action.RECOMPUTE, Action.COMPRESS)
    }
    lossy = frozenset((*key, c) for key, cs in choices.items() for c in cs if c.action.encodes)
    for share in SHARES:
        found[f"solved {share}"] = solved(made, share)
        found[f"lossless {share}"] = solved(made, share, refused=lossy)
        if share in GREEDY:
            found[f"greedy {share}"] = solved(made, share, solver=greedy)
    found = {name: actions for name, actions in found.items() if actions is not None}
    found |= {b.name: b.actions for b in baselines(made) if b.exact and b.name != "keep_everything"}
    rng = random.Random(0)
    lossless = lambda open_: rng.choice([c for c in open_ if not c.action.encodes])
    for i in range(RANDOM):
        found[f"random {i}"] = drawn(made, rng.choice if i % 2 else lossless)
    return {BASE: made.everything_kept} | different(made, found)


def in_rounds(report: Report, name: str) -> None:
    if report.has(f"{name}, {BASE}"):
        return
    with on("local") as backend:
        step = Step(*local_step(CASES[name]), backend)
        made, steps = step.profile, step.compiler
        chosen = plans(made)
        say(f"{name}: {len(chosen)} plans are compiled")
        compiled = steps.compile_buffers(*chosen.values())
        say(f"{name}: they run for {SECONDS:.0f} s")
        rounds = dict(zip(chosen, steps.run(*compiled, seconds=SECONDS), strict=True))
    base = rounds[BASE]
    least, kept = min(base), evaluate(made, made.everything_kept).seconds
    for plan, one in zip(chosen, compiled, strict=True):
        apart = [s / b for s, b in zip(rounds[plan], base, strict=True)]
        predicted = 1 + (evaluate(made, one.actions).seconds - kept) / least
        row = errors(predicted, statistics.median(apart))
        quartiles = statistics.quantiles(apart, n=4)[::2]
        report.add(f"{name}, {plan}", row | {"quartiles": quartiles})
    jax.clear_caches()


def errors(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}


def of_rows(rows: list[dict]) -> dict:
    rank: Any = spearmanr([r["predicted"] for r in rows], [r["measured"] for r in rows])
    found = {"plans": len(rows), "Spearman": float(rank.statistic)}
    return found | of_errors(r["error"] for r in rows)


def of_rounds(report: Report) -> dict:
    # The step that all are compared with is no plan.
    of = lambda name: [r for k, r in report.under(f"{name}, ").items() if k != BASE]
    rows = {name: of(name) for name in CASES}
    rows["all"] = [*itertools.chain(*rows.values())]
    return {name: of_rows(own) for name, own in rows.items()}


# -- placed_times

PLACED = {"gpt_nano": [], "gpt_nano, 4 times as wide": ["model.width=512", "train.batch=4"]}
MEMORY = (1.0, 0.8, 0.6, 0.45)  # shares of the bytes of everything on the device
DECIDE = "actions", "states"
ROUNDS = 11


def within_memory(case: Case) -> dict[str, jaxmem.Plan]:
    """A plan for each share of the memory, if there is one. The first is for all memory."""
    whole = case.plan(None, decide=DECIDE)
    budgets = {str(share): int(share * whole.compiled_bytes) for share in MEMORY[1:]}
    found = {share: case.attempt(budget, decide=DECIDE)[0] for share, budget in budgets.items()}
    return {str(MEMORY[0]): whole} | {share: plan for share, plan in found.items() if plan}


def placed(model: str) -> dict:
    config = nano(*OWN, *NO_DROPOUT, "optimizer.clip=component", *PLACED[model])
    plans = within_memory(Case(config, on("local")))
    steps = {share: plan.step for share, plan in plans.items()}
    fresh = jax.jit(lambda: init_state(config))
    states = {share: plan.place(fresh()) for share, plan in plans.items()}
    tokens = jnp.zeros_like(first_batch(config))
    clock, _ = in_turns([steps], ROUNDS, states, tokens)
    measured = {share: min(seconds) for share, seconds in clock.items()}
    predicted = {share: plan.predicted_seconds for share, plan in plans.items()}
    found, whole = {}, str(MEMORY[0])
    for share in plans:
        row = errors(predicted[share] / predicted[whole], measured[share] / measured[whole])
        found[share] = row | {"absolute": predicted[share] / measured[share]}
    return found


def of_placed(report: Report) -> dict:
    found = [r for rows in report.results.values() for s, r in rows.items() if s != "1.0"]
    return {"plans": len(found)} | of_errors(r["error"] for r in found)


# -- time_spread

SESSIONS = 8


class Pieces(Local):
    """Keeps the pieces that it is asked to time."""

    def times(self, jobs):
        self.jobs: list[Job] = list(jobs)
        return [Timing(1e-4)] * len(jobs)


def pieces() -> list[Job]:
    with tempfile.TemporaryDirectory() as folder:
        database = Database(pathlib.Path(folder) / "profile.sqlite")
        backend = Pieces(Target.parse("local"), database)
        assert Case("gpt_nano", backend).profile.time_source == "measured"
    return backend.jobs


def before_all_others(first: bool) -> None:
    """Schedules all threads of this process before the threads of other processes (`first`), or by
    the default policy.
    """
    policy = os.SCHED_FIFO if first else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(int(first)))


def session(jobs: list[Job], first: bool) -> dict:
    """Least seconds of each piece and the spread of its runs, as the library takes them."""
    before_all_others(first)
    try:
        runs = [time_piece(job) for job in jobs]
    finally:
        before_all_others(False)
    return {
        "first": first,
        "seconds": [min(r) for r in runs],
        "spreads": [statistics.median(r) / min(r) - 1 for r in runs],
    }


def of_sessions(own: list[dict], least: list[float]) -> dict:
    errors = [[t / best - 1 for t, best in zip(s["seconds"], least)] for s in own]
    medians = lambda many: sorted(round(statistics.median(one), 3) for one in many)
    spreads = medians(s["spreads"] for s in own)
    return {"spread_of_sessions": spreads, "error_of_sessions": medians(errors)}


def of_spread(report: Report) -> dict:
    sessions = report.results.values()
    least = [min(seconds) for seconds in zip(*(s["seconds"] for s in sessions))]
    of = lambda first: of_sessions([s for s in sessions if s["first"] == first], least)
    return {"before_others": of(True), "beside_others": of(False)}


def sessions(report: Report) -> None:
    jobs = pieces()
    for number, first in itertools.product(range(SESSIONS), (True, False)):
        key = f"{'before' if first else 'beside'} others, {number}"
        report.once(key, session, jobs, first)


# -- jit_calls

ARRAYS = (4, 50, 200)
CALLS, TURNS = 50, 15


def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w) @ w
    return (x**2).mean()


def many_calls(jit):
    function = jit(step_of(loss, 0.01), donate_argnums=0)

    def calls(weights, x):
        for _ in range(CALLS):
            weights, value = function(weights, x)
        return weights, value

    return calls


def calls(arrays: int) -> dict:
    ways = {"jax.jit": many_calls(jax.jit), "jaxmem.jit": many_calls(jaxmem.jit)}
    states = {way: [jnp.full((8, 8), 0.01) for _ in range(arrays)] for way in ways}
    clock, _ = in_turns([ways], TURNS, states, jnp.ones((2, 8)))
    least = {way: min(seconds) / CALLS for way, seconds in clock.items()}
    own, ours = least.values()
    return least | {"ratio": ours / own, "more": 1e6 * (ours - own)}


def summary_of_calls(report: Report) -> dict:
    return {"most microseconds more": max(row["more"] for row in report.results.values())}


RESULTS = {
    "step_times": Benchmark(CASES, in_rounds, of_rounds),
    "placed_times": Benchmark(PLACED, row=placed, summary=of_placed),
    "time_spread": Benchmark(run=sessions, summary=of_spread),
    "jit_calls": Benchmark(ARRAYS, row=calls, summary=summary_of_calls),
}

if __name__ == "__main__":
    measure("times", RESULTS)
