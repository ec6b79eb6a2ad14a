"""AdamA while it trains: final losses against Adam's, its second moment against Adam's, and step
time against accumulation.

    python -m benchmarks.adama_training [RESULT ...]

`adama_convergence`: final losses of AdamA with 2, 4 and 8 microbatches against Adam's, over seeds,
with the paper's second moment and with the row ratio (AdamA, Fig. 2 and 3; M6, M7). A GPT on two
texts and a BERT, two layers of width 64, 250 steps of 32 sequences of 32 bytes; a ResNet of 14
layers on scikit-learn's digits, 200 steps of 64 images. The texts are Python's standard library,
and Python's C headers. Beta2 is 0.95 and 0.999, the rate is Adam's. Adam takes the mean of the same
microbatches: in the GPT and the BERT that is the batch's gradient, so Adam takes the whole batch;
in the ResNet, whose batch norm sees a microbatch, gradients are added. AdamA's steps are released
in the GPT and the BERT; the ResNet uses the unreleased transformation. The spread of seeds is
Adam's largest final loss minus its smallest; a difference is of means.

`adama_ratio`: how far AdamA's second moment is from Adam's, the mean of sqrt(v) / sqrt(v') (AdamA,
Fig. 4; M8). The same ResNet with N = 2, 4 and 8 microbatches, with the paper's second moment and
with the row ratio. v gathers the squares of the microbatches' gradients g_i / N, and is multiplied
by the ratio of its row if there is one; v' gathers the square of their sum, both along the same run
and corrected for their start. Each step has the mean of sqrt(v) / sqrt(v') over all values, the
median, and the signal-to-noise ratio of the microbatches' gradients: |mean|² over the sum of
variances, less 1 / N, which is the noise in the mean itself; where noise rules it is 0 and may come
out below. An array of ratio s everywhere has sqrt(v) / sqrt(v') of sqrt((1 + s) / (1 + N s)): 1
where noise rules. In the first steps, gradients of blocks that start as the identity are nearly 0,
and the mean is far above 1.

`adama_time`: step time of a GPT on this CPU by how its 8 microbatches become one step: AdamA
against accumulation in place. gpt_nano, and the same at width 512, where the states' traffic weighs
more; layers are recomputed, all in jaxmem.stack. Gradients are clipped by value unless the row says
otherwise. Steps run in turns, in every round in another order; ratios are to "in_place", paired by
round: median and quartiles, by the clock and by all cores' work.
"""

import dataclasses
import itertools
import statistics
import sysconfig
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.shared.case import nano, trained
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.steps import compile_planned
from benchmarks.shared.timing import cache_compiles, clock_and_cores, first_batch, in_turns
from experiments.command.load import load
from experiments.config.images import ImageConfig
from experiments.running.images import IMAGES
from experiments.running.text import TEXT, evaluate
from experiments.steps.images import make_step as image_step
from experiments.steps.step import first_state
from jaxmem._optim.adama import ratio

# -- adama_convergence

SEEDS, COUNTS, BETAS = (0, 1, 2), (2, 4, 8), (0.95, 0.999)
WAYS = ("squares", "row")
SMALL = (
    "model.layers=2", "model.width=64", "model.heads=4", "model.dropout=0.0",
    "model.attention_dropout=0.0", "plan.budget=none", "train.steps=250", "train.batch=32",
    "train.sequence=32", "train.loss_chunk=32", "optimizer.clip=none",
)  # fmt: skip
RELEASED = "optimizer.accumulation=released", "model.loop=stack"
SMALL_RESNET = "model.depth=14", "model.width=8", "train.steps=200", "train.batch=64"
HEADERS = sysconfig.get_path("include")
MODELS = {
    "GPT": (),
    "GPT, C headers": (f"data.path={HEADERS}",),
    "BERT": ("model.kind=bert", "model.vocab=257"),
    "ResNet": None,
}
CURVE = 20  # steps to a point


def resnet_of(way: str, n: int, *overrides: str) -> ImageConfig:
    """A ResNet of 14 layers on scikit-learn's digits, under Adam or AdamA."""
    how = "accumulation=scan" if way == "Adam" else f"second_moment={way}"
    own = f"train.microbatches={n}", f"optimizer.{how}"
    return load("resnet50_digits", [*SMALL_RESNET, *own, *overrides], ImageConfig)


def config_of(model: str, beta2: str, way: str, n: int, seed: str):
    common = f"optimizer.{beta2}".replace(" ", "="), f"train.{seed}".replace(" ", "=")
    if model == "ResNet":
        return resnet_of(way, n, *common)
    folded = f"train.microbatches={n}", f"optimizer.second_moment={way}", *RELEASED
    how = () if way == "Adam" else folded
    return nano(*SMALL, *MODELS[model], *common, *how)


def train(model: str, *case) -> dict:
    config: Any = config_of(model, *case)
    kind: Any = IMAGES if model == "ResNet" else TEXT
    score: Any = IMAGES.evaluate if model == "ResNet" else evaluate  # without a sample of text
    data = kind.read(config)
    state, metrics = trained(kind, config, data, kind.step(config, data).step)
    losses = [float(one["loss"]) for one in metrics]
    points = (losses[i : i + CURVE] for i in range(0, len(losses), CURVE))
    curve = [round(statistics.fmean(point), 4) for point in points]
    return {"final": score(config, state, data)["val_loss"], "curve": curve}


def ways(model: str) -> list[tuple[str, int]]:
    """Adam, and every other way with its number of microbatches."""
    adam = COUNTS if model == "ResNet" else (1,)
    return [*(("Adam", n) for n in adam), *itertools.product(WAYS, COUNTS)]


TRAINED = [
    (model, f"beta2 {beta}", way, n, f"seed {seed}")
    for seed, beta, model in itertools.product(SEEDS, BETAS, MODELS)
    for way, n in ways(model)
]


def cell(results: dict, model: str, beta: float, n: int) -> dict:
    """What a model's runs with a beta2 and a number of microbatches ended with, beside Adam's."""
    name = f"{model}, beta2 {beta}"
    finals = {
        way: [results[f"{name}, {way}, {count}, seed {seed}"]["final"] for seed in SEEDS]
        for way, count in ways(model)
        if count == n or (way == "Adam" and model != "ResNet")
    }
    adam = finals.pop("Adam")
    mean, spread = statistics.fmean(adam), max(adam) - min(adam)
    differences = {way: statistics.fmean(values) - mean for way, values in finals.items()}
    return {
        "Adam": mean,
        "spread": spread,
        "less Adam": differences,
        "within": {way: d <= spread for way, d in differences.items()},
        "row no worse than squares": differences["row"] - differences["squares"] <= spread,
    }


def of_convergence(report: Report) -> dict:
    return {
        f"{model}, beta2 {beta}, N={n}": cell(report.results, model, beta, n)
        for model, beta, n in itertools.product(MODELS, BETAS, COUNTS)
    }


# -- adama_ratio


def watched_step(config, adam):
    """step(state, Adam's moments, batch) -> (state, Adam's moments, the mean ratio, the median,
    signal-to-noise). `adam`: the config of Adam on added gradients.
    """
    train, by_adam = image_step(config), image_step(adam)
    b2, n = config.optimizer.beta2, config.train.microbatches

    def step(state, moments, batch):
        moments = by_adam(dataclasses.replace(state, moments=moments), batch)[0].moments
        state, metrics = train(state, batch)
        # both are divided by 1 - beta2^t, which cancels; an array that has seen no gradient has no
        # ratio
        other = jax.tree.leaves(optax.tree.get(moments, "nu"))
        pairs = zip(used(b2, n, state.moments), other, strict=True)
        ratios = [jnp.where(w > 0, jnp.sqrt(v / jnp.where(w > 0, w, 1)), jnp.nan) for v, w in pairs]
        values = jnp.concatenate([r.reshape(-1) for r in ratios])
        return state, moments, jnp.nanmean(values), jnp.nanmedian(values), metrics["snr"]

    return jax.jit(step, donate_argnums=(0, 1))


def used(b2: float, n: int, state) -> list:
    """The second moments that the update before this state was divided by."""
    nu = jax.tree.leaves(state.nu)
    if state.moments.square is None:
        return nu
    square = jax.tree.leaves(state.square)
    # With sums whose squares are the averages themselves the averages stay what they are.
    sums, given = [jnp.sqrt(s) for s in square], {"b2": b2, "done": state.count, "most": n}
    given |= {"like": nu, "axis_name": None, "stacked": [None] * len(nu)}
    _, scaled = ratio.scaled(nu, square, sums, **given)
    return scaled


def follow(way: str, microbatches: str) -> dict[str, list[float]]:
    n = int(microbatches.removeprefix("N="))
    config, adam = (resnet_of(how, n) for how in (way, "Adam"))
    data, state, rows = IMAGES.read(config), IMAGES.first_state(config, None), []
    moments, step = IMAGES.first_state(adam, None).moments, watched_step(config, adam)
    for number in range(1, config.train.steps + 1):
        state, moments, *found, snr = step(state, moments, IMAGES.batch(config, data, number))
        rows.append((*map(float, found), float(snr) - 1 / n))
    return dict(zip(("ratio", "median", "signal to noise"), map(list, zip(*rows))))


FOLLOWED = [(way, f"N={n}") for way in WAYS for n in COUNTS]


def of_ratio(report: Report) -> dict:
    last = lambda values: statistics.fmean(values[-50:])
    return {
        name: {
            "largest": max(row["ratio"]),
            "mean of the last 50 steps": last(row["ratio"]),
            "median of the last 50 steps": last(row["median"]),
        }
        for name, row in report.results.items()
    }


# -- adama_time

ROUNDS = 25
COMMON = "model.loop=stack", "train.microbatches=8"
ROW = "optimizer.second_moment=row"
MICROBATCHED = {  # accumulation, clipping, and more
    "scan": ("scan", "value"),
    "in_place": ("in_place", "value"),
    "adama": ("adama", "value"),
    "released": ("released", "value"),
    "released, row ratio": ("released", "value", ROW),
    "released, row ratio, not clipped": ("released", "none", ROW),
    "released, clipped by component": ("released", "component"),
    "released, clipped by global norm": ("released", "norm"),
}
SIZES = {
    "gpt_nano": (),
    "width 512": ("model.width=512", "train.sequence=64", "train.loss_chunk=64"),
}


def timed(report: Report, size: str) -> None:
    cache_compiles()
    configs = {}
    for name, (way, clip, *more) in MICROBATCHED.items():
        own = f"optimizer.accumulation={way}", f"optimizer.clip={clip}"
        configs[name] = nano(*COMMON, *own, *more, *SIZES[size])
    steps = {name: compile_planned(config, {"block": {}}) for name, config in configs.items()}
    states = {name: first_state(config) for name, config in configs.items()}
    seconds = in_turns([steps], ROUNDS, states, first_batch(configs["in_place"]))
    for way in steps:
        report.add(f"{size}, {way}", clock_and_cores(seconds, way, "in_place"))


def of_time(report: Report) -> dict:
    cores = {name: row["cores"]["median"] for name, row in report.results.items()}
    return {"median of cores' work, to accumulation in place": cores}


RESULTS = {
    "adama_convergence": Benchmark(TRAINED, row=train, summary=of_convergence),
    "adama_ratio": Benchmark(FOLLOWED, row=follow, summary=of_ratio),
    "adama_time": Benchmark(SIZES, timed, of_time),
}

if __name__ == "__main__":
    measure("adama_training", RESULTS)
