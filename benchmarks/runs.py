"""What happens to a run of gpt_nano on this CPU: its outlier channels change, and it saves.

    python -m benchmarks.runs [RESULT ...]

`rectified`: outliers are injected by gains at the tags: a tensor is multiplied by powers of two,
tagged, and divided by them, which changes no number of a step that stores its tensors as they are.
`loud` gains make a twelfth of the channels of each tag outliers, all layers alike; they begin and
end while the model trains.

`trained`: the same steps with everything kept, under the first plan to the end, and with a
rectifier, from each of three seeds: losses, decisions, and whether each plan that was taken is the
one that `jaxmem.plan` gives for the counts it was made for. The first plan has room for one outlier
in each tensor.
`stale`: seconds of steps under a plan with room for loud tensors against those under the plan for
quiet ones, at shares of the bytes of everything kept, in turns.
`between`: seconds of steps that are not tracked, with tracking against without, run after run in
turns.

`saving`: what saving every minute costs a training by `jaxmem.runs.train`, whose clock requests a
save every 17 steps here. A round is the 8 steps from a save on, during which it is also written,
and the 8 after them, in which nothing is saved; so what else the machine does falls on both alike.
The seconds of the former less the seconds of the latter are the cost of a save. A run that saves
every minute takes 1 + cost / 60 of the time of a run that does not. `blocks` are the seconds in
which the loop stands still: while the arrays are copied. `whole` are the seconds until the
checkpoint is on the disk.
"""

import functools
import pathlib
import random
import statistics
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.shared.case import nano
from benchmarks.shared.results import Benchmark, Report, measure, say
from benchmarks.shared.timing import in_turns, over
from experiments.config.text import Config
from experiments.running.planning import prepare
from experiments.running.text import TEXT
from experiments.steps.step import abstract, first_state, make_step
from jaxmem._target.processes.pace import Pace
from jaxmem._train.checkpoints.checkpoints import Checkpoints
from jaxmem._train.runs import train as training
from jaxmem._train.runs.record import rows_until

BUDGETS = {"0.30": 0.30, "0.35": 0.35, "0.40": 0.40}  # of the bytes of everything kept
SHARE = 0.30
STEPS, LOUD, QUIET, EVERY = 160, 45, 110, 16
SEEDS = 0, 1, 2
CODECS = dict.fromkeys(("linear", "norm", "gelu", "residual"), "outlier_separated(capacity=1)")
LAST = 20  # losses that are compared
ROUNDS, RUNS, RUN_STEPS = 40, 6, 48
WIDTHS = {"resid_in": 1, "ln1": 1, "attn": 1, "mid": 1, "ln2": 1, "up": 4, "gelu": 4}


def config_of(seed: int = 0) -> Config:
    return nano(f"train.steps={STEPS}", f"train.seed={seed}")


def gains(config: Config, loud: bool, every: int = 12) -> dict[str, jax.Array]:
    """For each tag, a factor for each channel. If loud, the factor of the first channels, one in
    `every` channels, is 64.
    """
    channels = {tag: times * config.model.width for tag, times in WIDTHS.items()}
    gain = 64.0 if loud else 1.0
    return {tag: jnp.ones(n, jnp.float32).at[: n // every].set(gain) for tag, n in channels.items()}


def tagged_by(factors: dict[str, jax.Array]):
    """While the statement runs, tags store their tensors multiplied."""
    plain = jaxmem.tag

    def tag(x, name, **given):
        if name not in factors:
            return plain(x, name, **given)
        factor = factors[name].astype(x.dtype)
        return plain(x * factor, name, **given) / factor

    return mock.patch.object(jaxmem, "tag", tag)


def batches(config: Config):
    data = TEXT.read(config)
    loud = lambda number: LOUD <= number < QUIET
    return lambda number: (TEXT.batch(config, data, number), gains(config, loud(number)))


def losses(step, config: Config, rectifier=None, steps: int = STEPS) -> tuple[list, list]:
    """The losses of all steps, and the decisions that were made."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run"
        with jaxmem.runs.record(out, resume=True) as run:
            jaxmem.runs.train(
                step, functools.partial(first_state, config), batches(config), steps=steps,
                run=run, save_every=600.0, rectifier=rectifier,
            )  # fmt: skip
        files = out / "metrics.jsonl", out / "decisions.jsonl"
        rows, decisions = (rows_until(path, steps)[0] for path in files)
        return rows, decisions


class Recording(jaxmem.runs.Rectifier):
    """One that keeps the plans that it took."""

    @functools.cached_property
    def taken(self) -> list[jaxmem.Plan]:
        return []

    def _swap(self, number, plan, *given, **numbers):
        self.taken.append(plan)
        return super()._swap(number, plan, *given, **numbers)


class Planning:
    """A config's step and what plans it within a share of the bytes of everything kept."""

    def __init__(self, share: float, seed: int = 0, **given):
        self.config = config_of(seed)
        state, tokens = abstract(self.config)
        self.args = state, (tokens, jax.eval_shape(lambda: gains(self.config, True)))
        self.kept = jaxmem.plan(self.build, *self.args)
        budget = int(share * self.kept.baseline_bytes)
        self.plan = functools.partial(jaxmem.plan, self.build, *self.args, budget=budget, **given)

    def build(self, plan):
        step = make_step(self.config, plan)

        def louder(state, batch):
            tokens, factors = batch
            with tagged_by(factors):
                return step(state, tokens)

        return louder

    def rectifier(self, kind: type, plan: jaxmem.Plan, **more):
        return kind(plan, self.build, *self.args, every=EVERY, **more)


def trained(seed: int) -> dict:
    planning = Planning(SHARE, seed, codecs=CODECS)
    plan = planning.plan()
    rectifier = planning.rectifier(Recording, plan, codecs=CODECS)
    ways = {
        "everything kept": (planning.kept.step, None),
        "first plan": (plan.step, None),
        "rectified": (plan.step, rectifier),
    }
    found, beyond = {}, "outliers_beyond_room"
    for name, (step, revising) in ways.items():
        say(name)
        rows, decisions = losses(step, planning.config, revising)
        mean = lambda end, rows=rows: statistics.fmean(r["loss"] for r in rows[end - LAST : end])
        found[name] = {
            "loss": mean(len(rows)),
            "loss while loud": mean(QUIET - 1),
            "beyond room": {row["step"]: row[beyond] for row in rows if beyond in row},
            "decisions": decisions,
        }
    # Each plan that was taken was made for the counts of the decision before it.
    counts, as_planned, taken = None, [], iter(rectifier.taken)
    for row in found["rectified"]["decisions"]:
        counts = row.get("outliers", counts)
        if row.get("event") == "swap":
            again = planning.plan(outliers=counts)
            as_planned.append(again.actions == next(taken).actions)
    return found | {"as planned": as_planned}


def stale(share: str) -> dict:
    """Steps under the plan for loud tensors, and under the one for quiet ones."""
    planning = Planning(BUDGETS[share])
    config = planning.config
    rooms = {
        "loud": {t: times * config.model.width // 12 for t, times in WIDTHS.items()},
        "quiet": dict.fromkeys(WIDTHS, 2),
    }
    plans = {name: planning.plan(outliers={"block": room}) for name, room in rooms.items()}
    states = {name: first_state(config) for name in plans}
    steps = {name: plan.step for name, plan in plans.items()}
    seconds, _ = in_turns([steps], ROUNDS, states, batches(config)(1))
    found = over(seconds["loud"], seconds["quiet"])
    quartiles = [found[key] for key in ("lower_quartile", "median", "upper_quartile")]
    predicted = plans["loud"].predicted_seconds / plans["quiet"].predicted_seconds
    return {"ratio": found["median"], "quartiles": quartiles, "predicted ratio": predicted}


class Counting(jaxmem.runs.Rectifier):
    """One that counts, and plans nothing."""

    def compile_buffers(self, number, left):
        return []


def between() -> dict:
    planning = Planning(SHARE)
    plan = planning.plan()
    medians: dict[str, list[float]] = {"tracked": [], "not tracked": []}
    for number in range(RUNS):
        for name in random.Random(number).sample(list(medians), len(medians)):
            counting = planning.rectifier(Counting, plan)
            tracks = counting if name == "tracked" else None
            rows, _ = losses(plan.step, planning.config, tracks, RUN_STEPS)
            due = counting._watch.is_due
            alone = [r for r in rows if not (due(r["step"]) or due(r["step"] - 1))]
            seconds = (row["step_seconds"] for row in alone if "step_seconds" in row)
            medians[name].append(statistics.median(seconds))
            say(f"{name}: {medians[name][-1]:.4f} s")
    ratios = [b / a for a, b in zip(*medians.values(), strict=True)]
    return {"throughput": statistics.median(ratios), "ratios": ratios}


def summary(report: Report) -> dict:
    found = list(report.under("trained, ").values())
    loss = lambda one, name: one[name]["loss"] / one["everything kept"]["loss"] - 1
    of = lambda name: {"loss": {"by seed": [loss(one, name) for one in found]}}
    return {
        "loss against everything kept": {name: of(name) for name in ("first plan", "rectified")},
        "plans taken": [len(one["as planned"]) for one in found],
        "throughput between trackings": report["between"]["throughput"],
    }


# -- saving

SAVES = 60
HALF = 8  # steps of each half of a round
MINUTE = 60.0  # seconds between two saves, by the clock of the loop and by the clock of the result
NANO = nano("plan.budget=none")


class Watched(Checkpoints):
    """Notes when each save began, and what it took."""

    noted: dict[int, dict[str, float]]

    def save(self, step, state, notes):
        self.noted[step] = {"began": time.perf_counter()}
        super().save(step, state, notes)
        self.noted[step]["blocks"] = time.perf_counter() - self.noted[step]["began"]

    def _finish(self, path, step, leaves, notes, failed):
        super()._finish(path, step, leaves, notes, failed)
        self.noted[step]["whole"] = time.perf_counter() - self.noted[step]["began"]


def saved(rounds: int) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """What each save took, and when each row was there, by step."""
    ready, data, seen = prepare(NANO), TEXT.read(NANO), {0: 0.0}
    saves: dict[int, dict[str, float]] = {}
    clock = lambda: MINUTE * max(seen) / (2 * HALF)
    batch = lambda number: TEXT.batch(NANO, data, number)
    note = lambda number, row: seen.update({number: time.perf_counter()})
    Watched.noted = saves
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(training, "Pace", functools.partial(Pace, clock=clock)),
        mock.patch.object(training, "Checkpoints", Watched),
        jaxmem.runs.record(pathlib.Path(folder) / "out", resume=True) as run,
    ):
        given = {"steps": (2 * HALF + 1) * (rounds + 2), "run": run, "save_every": MINUTE}
        first = lambda: TEXT.first_state(NANO, None)
        jaxmem.runs.train(ready.step, first, batch, **given, each=note)
    return saves, seen


def of_saves(report: Report) -> None:
    saves, seen = saved(SAVES)
    # Neither the first nor the last: the half without the last one does not exist.
    whole = sorted(step for step in saves if step and step + 2 * HALF < max(seen))
    report.results = {}
    for step in whole[1 : SAVES + 1]:
        begin, middle, end = (seen[step + n * HALF] for n in (0, 1, 2))
        took = {key: saves[step][key] for key in ("blocks", "whole")}
        report.add(f"step {step}", {"with": middle - begin, "without": end - middle} | took)


def summary_of_saves(report: Report) -> dict:
    rounds = list(report.results.values())
    extra = [one["with"] - one["without"] for one in rounds]
    low, median, high = (1 + seconds / MINUTE for seconds in statistics.quantiles(extra, n=4))
    blocks = [one["blocks"] for one in rounds]
    return {
        "ratio, median": median,
        "ratio, quartiles": [low, high],
        "blocks, median": statistics.median(blocks),
        "blocks, most": max(blocks),
        "whole, median": statistics.median(one["whole"] for one in rounds),
    }


MEASURES = {"trained": trained, "stale": stale, "between": between}
CASES = [*(("trained", seed) for seed in SEEDS), *(("stale", share) for share in BUDGETS)]
RESULTS = {
    "rectified": Benchmark(
        [*CASES, "between"], row=lambda name, *case: MEASURES[name](*case), summary=summary
    ),
    "saving": Benchmark(run=of_saves, summary=summary_of_saves),
}


if __name__ == "__main__":
    measure("runs", RESULTS)
