"""What a rectifier does while gpt_nano trains on the CPU and its outlier channels change.

    python -m benchmarks.rectified

Outliers are injected by gains at the tags: a tensor is multiplied by powers of two, tagged, and
divided by them, which changes no number of a step that stores its tensors as they are. `loud` gains
make a twelfth of the channels of each tag outliers, all layers alike; they begin and end while the
model trains.

`trained`: the same steps with everything kept, under the first plan to the end, and with a
rectifier, from each of three seeds: losses, decisions, and whether each plan that was taken is the
one that `jaxmem.plan` gives for the counts it was made for. The first plan has room for one outlier
in each tensor.
`stale`: seconds of steps under a plan with room for loud tensors against those under the plan for
quiet ones, at shares of the bytes of everything kept, in turns.
`between`: seconds of steps that are not tracked, with tracking against without, run after run in
turns.
"""

import functools
import json
import pathlib
import random
import statistics
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.shared.results import Benchmark, Report, measure, say
from benchmarks.shared.timing import in_turns
from experiments.command.load import load
from experiments.config.text import Config
from experiments.data import text
from experiments.models import registry
from experiments.running.text import read
from experiments.steps.step import abstract, first_state, make_step

BUDGETS = {"0.30": 0.30, "0.35": 0.35, "0.40": 0.40}  # of the bytes of everything kept
SHARE = 0.30
STEPS, LOUD, QUIET, EVERY = 160, 45, 110, 16
SEEDS = 0, 1, 2
CODECS = dict.fromkeys(("linear", "norm", "gelu", "residual"), "outlier_separated(capacity=1)")
LAST = 20  # losses that are compared
ROUNDS, RUNS, RUN_STEPS = 40, 6, 48
WIDTHS = {"resid_in": 1, "ln1": 1, "attn": 1, "mid": 1, "ln2": 1, "up": 4, "gelu": 4}


def config_of(seed: int = 0) -> Config:
    return load("gpt_nano", [f"train.steps={STEPS}", f"train.seed={seed}"])


def gains(config: Config, loud: bool) -> dict[str, jax.Array]:
    """For each tag a factor a channel: 64 for the first twelfth of them where it is loud."""
    found = {}
    for tag, times in WIDTHS.items():
        channels = times * config.model.width
        ones = jnp.ones(channels, jnp.float32)
        found[tag] = ones.at[: channels // 12].set(64.0) if loud else ones
    return found


def tagged_by(factors: dict[str, jax.Array]):
    """While the statement runs, tags store their tensors multiplied."""
    plain = jaxmem.tag

    def tag(x, name, **given):
        if name not in factors:
            return plain(x, name, **given)
        factor = factors[name].astype(x.dtype)
        return plain(x * factor, name, **given) / factor

    return mock.patch.object(jaxmem, "tag", tag)


def build_of(config: Config):
    def build(plan):
        step = make_step(config, plan)

        def louder(state, batch):
            tokens, factors = batch
            with tagged_by(factors):
                return step(state, tokens)

        return louder

    return build


def shapes(config: Config):
    state, tokens = abstract(config)
    return state, (tokens, jax.eval_shape(lambda: gains(config, True)))


def batches(config: Config):
    data, t = read(config), config.train

    def batch(number: int):
        rows = text.sample(data.train, t.seed, number, t.batch, t.sequence)
        tokens = registry.batch(config, rows, number)
        return tokens, gains(config, LOUD <= number < QUIET)

    return batch


def losses(step, config: Config, rectifier=None, steps: int = STEPS) -> tuple[list, list]:
    """The losses of all steps, and the decisions that were made."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run"
        with jaxmem.runs.record(out, resume=True) as run:
            jaxmem.runs.train(
                step, functools.partial(first_state, config), batches(config), steps=steps,
                run=run, save_every=600.0, rectifier=rectifier,
            )  # fmt: skip
        rows = [
            json.loads(line)
            for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        decided = out / "decisions.jsonl"
        lines = decided.read_text(encoding="utf-8").splitlines() if decided.exists() else []
        return rows, [json.loads(line) for line in lines]


class Recording(jaxmem.runs.Rectifier):
    """One that keeps the plans that it took."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.taken = []

    def _swap(self, number, plan, *given, **numbers):
        self.taken.append(plan)
        return super()._swap(number, plan, *given, **numbers)


class Planning:
    """A config's step and what plans it within a share of the bytes of everything kept."""

    def __init__(self, share: float, seed: int = 0, **given):
        self.config, self.given = config_of(seed), given
        self.build, self.args = build_of(self.config), shapes(self.config)
        self.kept = jaxmem.plan(self.build, *self.args)
        self.budget = int(share * self.kept.baseline_bytes)

    def plan(self, **more) -> jaxmem.Plan:
        return jaxmem.plan(self.build, *self.args, budget=self.budget, **self.given, **more)


def trained(seed: int) -> dict:
    planning = Planning(SHARE, seed, codecs=CODECS)
    plan = planning.plan()
    rectifier = Recording(plan, planning.build, *planning.args, every=EVERY, codecs=CODECS)
    ways = {
        "everything kept": (planning.kept.step, None),
        "first plan": (plan.step, None),
        "rectified": (plan.step, rectifier),
    }
    found = {}
    for name, (step, revising) in ways.items():
        say(name)
        rows, decisions = losses(step, planning.config, revising)
        key = "outliers_beyond_room"
        found[name] = {
            "loss": statistics.fmean(row["loss"] for row in rows[-LAST:]),
            "loss while loud": statistics.fmean(
                row["loss"] for row in rows[QUIET - LAST - 1 : QUIET - 1]
            ),
            "beyond room": {row["step"]: row[key] for row in rows if key in row},
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
    names = {name: name for name in plans}
    seconds, _ = in_turns([steps], ROUNDS, states, names, batches(config)(1))
    ratios = [a / b for a, b in zip(seconds["loud"], seconds["quiet"], strict=True)]
    loud, quiet = plans.values()
    return {
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
        "predicted ratio": loud.predicted_seconds / quiet.predicted_seconds,
        "compiled": {name: plan.compiled_bytes for name, plan in plans.items()},
        "same actions": _of(loud) == _of(quiet),
    }


def _of(plan) -> dict:
    return {t: c.action for tags in plan.actions.values() for t, c in tags.items()}


class Counting(jaxmem.runs.Rectifier):
    """One that counts, and plans nothing."""

    def compile_buffers(self, number, left):
        return []


def between() -> dict:
    planning = Planning(SHARE)
    plan = planning.plan()
    counting = lambda: Counting(plan, planning.build, *planning.args, every=EVERY)
    medians: dict[str, list[float]] = {"tracked": [], "not tracked": []}
    for number in range(RUNS):
        for name in random.Random(number).sample(list(medians), len(medians)):
            due = counting()._watch.is_due
            every = counting() if name == "tracked" else None
            rows, _ = losses(plan.step, planning.config, every, RUN_STEPS)
            timed = [row for row in rows if "step_seconds" in row]
            alone = [r for r in timed if not (due(r["step"]) or due(r["step"] - 1))]
            medians[name].append(statistics.median(row["step_seconds"] for row in alone))
            say(f"{name}: {medians[name][-1]:.4f} s")
    ratios = [b / a for a, b in zip(*medians.values(), strict=True)]
    return {"throughput": statistics.median(ratios), "ratios": ratios}


def summary(report: Report) -> dict:
    found = list(report.under("trained, ").values())
    of = lambda name, key: [one[name][key] / one["everything kept"][key] - 1 for one in found]
    mean = lambda values: {"mean": statistics.fmean(values), "by seed": values}
    rectified = [one["rectified"] for one in found]
    stale = report.under("stale, ")
    return {
        "loss against everything kept": {
            name: {key: mean(of(name, key)) for key in ("loss", "loss while loud")}
            for name in ("first plan", "rectified")
        },
        "plans taken": [len(one["as planned"]) for one in found],
        "as the program says": [sum(one["as planned"]) for one in found],
        "decisions": [len(one["decisions"]) for one in rectified],
        "outliers without room": [sum(one["beyond room"].values()) for one in rectified],
        "stale against rectified": {share: row["ratio"] for share, row in stale.items()},
        "predicted": {share: row["predicted ratio"] for share, row in stale.items()},
        "throughput between trackings": report["between"]["throughput"],
    }


MEASURES = {"trained": trained, "stale": stale, "between": between}
CASES = [*(("trained", seed) for seed in SEEDS), *(("stale", share) for share in BUDGETS)]
RESULTS = {
    "rectified": Benchmark(
        [*CASES, "between"], row=lambda name, *case: MEASURES[name](*case), summary=summary
    )
}


if __name__ == "__main__":
    measure("rectified", RESULTS)
