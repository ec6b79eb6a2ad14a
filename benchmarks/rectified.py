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

import contextlib
import functools
import json
import pathlib
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.shared.results import Report, say
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


@contextlib.contextmanager
def tagged_by(factors: dict[str, jax.Array]) -> Iterator[None]:
    """While the statement runs, tags store their tensors multiplied."""
    plain = jaxmem.tag

    def tag(x, name, **given):
        if name not in factors:
            return plain(x, name, **given)
        factor = factors[name].astype(x.dtype)
        return plain(x * factor, name, **given) / factor

    jaxmem.tag = tag
    try:
        yield
    finally:
        jaxmem.tag = plain


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


def trained(report: Report, seed: int) -> None:
    config = config_of(seed)
    build, args = build_of(config), shapes(config)
    kept = jaxmem.plan(build, *args)
    budget = int(SHARE * kept.baseline_bytes)
    plan = jaxmem.plan(build, *args, budget=budget, codecs=CODECS)
    rectifier = Recording(plan, build, *args, every=EVERY, codecs=CODECS)
    ways = {
        "everything kept": (kept.step, None),
        "first plan": (plan.step, None),
        "rectified": (plan.step, rectifier),
    }
    found = {}
    for name, (step, revising) in ways.items():
        say(name)
        rows, decisions = losses(step, config, revising)
        last = [row["loss"] for row in rows[-LAST:]]
        loud = [row["loss"] for row in rows[QUIET - LAST - 1 : QUIET - 1]]
        found[name] = {
            "loss": statistics.fmean(last),
            "loss while loud": statistics.fmean(loud),
            "beyond room": {
                r["step"]: r["outliers_beyond_room"] for r in rows if "outliers_beyond_room" in r
            },
            "decisions": decisions,
        }
    # Each plan that was taken was made for the counts of the decision before it.
    decisions, counts, as_planned = found["rectified"]["decisions"], None, []
    taken = iter(rectifier.taken)
    for row in decisions:
        counts = row.get("outliers", counts)
        if row.get("event") == "swap":
            again = jaxmem.plan(build, *args, budget=budget, codecs=CODECS, outliers=counts)
            as_planned.append(again.actions == next(taken).actions)
    found["as planned"] = as_planned
    report.add(f"trained, {seed}", found)


def stale(report: Report, share: str) -> None:
    """Steps under the plan for loud tensors, and under the one for quiet ones."""
    config = config_of()
    build, args = build_of(config), shapes(config)
    budget = int(BUDGETS[share] * jaxmem.plan(build, *args).baseline_bytes)
    room = {t: times * config.model.width // 12 for t, times in WIDTHS.items()}
    plans = {
        "loud": jaxmem.plan(build, *args, budget=budget, outliers={"block": room}),
        "quiet": jaxmem.plan(
            build, *args, budget=budget, outliers={"block": dict.fromkeys(WIDTHS, 2)}
        ),
    }
    batch = batches(config)(1)
    states = {name: first_state(config) for name in plans}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(ROUNDS + 1):
        for name in random.Random(number).sample(list(plans), len(plans)):
            start = time.perf_counter()
            states[name], metrics = plans[name].step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            if number:
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["loud"], seconds["quiet"], strict=True)]
    predicted = {name: plan.predicted_seconds for name, plan in plans.items()}
    report.add(
        f"stale, {share}",
        {
            "ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
            "predicted ratio": predicted["loud"] / predicted["quiet"],
            "compiled": {name: plan.compiled_bytes for name, plan in plans.items()},
            "same actions": _of(plans["loud"]) == _of(plans["quiet"]),
        },
    )


def _of(plan) -> dict:
    return {t: c.action for tags in plan.actions.values() for t, c in tags.items()}


class Counting(jaxmem.runs.Rectifier):
    """One that counts, and plans nothing."""

    def compile_buffers(self, number, left):
        return []


def between(report: Report) -> None:
    config = config_of()
    build, args = build_of(config), shapes(config)
    budget = int(SHARE * jaxmem.plan(build, *args).baseline_bytes)
    plan = jaxmem.plan(build, *args, budget=budget)
    medians: dict[str, list[float]] = {"tracked": [], "not tracked": []}
    for number in range(RUNS):
        for name in random.Random(number).sample(list(medians), len(medians)):
            every = Counting(plan, build, *args, every=EVERY) if name == "tracked" else None
            due = Counting(plan, build, *args, every=EVERY)._watch.is_due
            rows, _ = losses(plan.step, config, every, RUN_STEPS)
            alone = [
                row["step_seconds"]
                for row in rows
                if "step_seconds" in row and not (due(row["step"]) or due(row["step"] - 1))
            ]
            medians[name].append(statistics.median(alone))
            say(f"{name}: {medians[name][-1]:.4f} s")
    ratios = [b / a for a, b in zip(*medians.values(), strict=True)]
    report.add("between", {"throughput": statistics.median(ratios), "ratios": ratios})


def summary(report: Report) -> dict:
    found = [report[f"trained, {seed}"] for seed in SEEDS]
    of = lambda name, key: [one[name][key] / one["everything kept"][key] - 1 for one in found]
    beyond = lambda one: sum(one["rectified"]["beyond room"].values())
    stale = {share: report[f"stale, {share}"] for share in BUDGETS}
    return {
        "loss against everything kept": {
            name: {
                key: {"mean": statistics.fmean(of(name, key)), "by seed": of(name, key)}
                for key in ("loss", "loss while loud")
            }
            for name in ("first plan", "rectified")
        },
        "plans taken": [len(one["as planned"]) for one in found],
        "as the program says": [sum(one["as planned"]) for one in found],
        "decisions": [len(one["rectified"]["decisions"]) for one in found],
        "outliers without room": [beyond(one) for one in found],
        "stale against rectified": {share: row["ratio"] for share, row in stale.items()},
        "predicted": {share: row["predicted ratio"] for share, row in stale.items()},
        "throughput between trackings": report["between"]["throughput"],
    }


def main() -> None:
    report = Report("rectified")
    warnings.simplefilter("ignore")
    for seed in SEEDS:
        if not report.has(f"trained, {seed}"):
            trained(report, seed)
    for share in BUDGETS:
        if not report.has(f"stale, {share}"):
            stale(report, share)
    if not report.has("between"):
        between(report)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()
