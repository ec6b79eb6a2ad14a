"""AdamA while it trains: final losses against Adam's, step time against accumulation, and why its
gradients are not summed in the second moment's low bits.

    python -m benchmarks.adama_training [RESULT ...]

`adama_convergence`: final losses of AdamA with 2, 4 and 8 microbatches against Adam's, over seeds,
with the paper's second moment and with the row ratio (AdamA, Fig. 2 and 3; M6, M7). A GPT on two
texts and a BERT, two layers of width 64, 250 steps of 32 sequences of 32 bytes; a ResNet of 14
layers on scikit-learn's digits, 200 steps of 64 images. The texts are Python's standard library,
and Python's C headers. Beta2 is 0.95 and 0.999, the rate is Adam's. Adam takes the mean of the same
microbatches: in the GPT and the BERT that is the batch's gradient, so Adam takes the whole batch;
in the ResNet, whose batch norm sees a microbatch, gradients are added. AdamA's steps are released
in the GPT and the BERT; the ResNet uses the unreleased transformation. `packed` is another way to
Adam's second moment without a buffer (`benchmarks/shared/packed.py`), for the GPT alone. The spread
of seeds is Adam's largest final loss minus its smallest; a difference is of means.

`adama_packed`: how long a step may be. A million parameters whose N microbatches have random
gradients. Adam's first step is the rate for each parameter. If the sum is rounded while it is
gathered (`packed`), a step is the rate times the mean gradient over the rounded mean, and a mean
that nearly cancels is rounded by more than its size. AdamA's steps, with squares and with the row
ratio, are at most √N of the rate. Rows are in units of the rate: the longest step, and the share of
steps that are longer than twice the rate.

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

import jaxmem
from benchmarks.shared import packed
from benchmarks.shared.case import compile_planned, nano, small_resnet
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.timing import cache_compiles, clock_and_cores, interleaved
from experiments.command.load import load
from experiments.config.text import Config
from experiments.data import images as image_data
from experiments.data import text as data
from experiments.models import registry as models
from experiments.running.images import evaluate as evaluate_images
from experiments.running.images import read as read_images
from experiments.running.text import evaluate
from experiments.steps import images as image_step
from experiments.steps.optimizer import learning_rate, matrices
from experiments.steps.step import init_state, make_loss, make_step

# -- adama_convergence

SEEDS, COUNTS, BETAS = (0, 1, 2), (2, 4, 8), (0.95, 0.999)
WAYS = ("squares", "row", "packed")
SMALL = (
    "model.layers=2", "model.width=64", "model.heads=4", "model.dropout=0.0",
    "model.attention_dropout=0.0", "plan.budget=none", "train.steps=250", "train.batch=32",
    "train.sequence=32", "train.loss_chunk=32", "optimizer.clip=none",
)  # fmt: skip
HEADERS = sysconfig.get_path("include")
MODELS = {
    "GPT": (),
    "GPT, C headers": (f"data.path={HEADERS}",),
    "BERT": ("model.kind=bert", "model.vocab=257"),
    "ResNet": None,
}
CURVE = 20  # steps to a point


def text_config(model: str, way: str, n: int, beta: float, seed: int) -> Config:
    folded = (
        "optimizer.accumulation=released", "model.loop=stack", f"train.microbatches={n}",
        f"optimizer.second_moment={way}",
    )  # fmt: skip
    said = f"train.seed={seed}", f"optimizer.beta2={beta}"
    how = {"Adam": (), "packed": (f"train.microbatches={n}",)}.get(way, folded)
    return load("gpt_nano", [*SMALL, *MODELS[model], *said, *how])


def packed_step(config: Config):
    """The step of an experiment, by `packed`."""
    o, n, loss = config.optimizer, config.train.microbatches, make_loss(config)
    rate = learning_rate(config)

    def step(state, batch):
        parts = jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), batch)
        one = lambda part: jax.value_and_grad(loss)(state.params, part)
        values, stacked = jax.lax.map(one, parts)
        gradients = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(n)]
        key = jax.random.key(7)
        count = state.moments.count
        m, v, moments = packed.minibatch(state.moments, gradients, o.beta1, o.beta2, key)
        u = jax.tree.map(lambda m, v: m / (v**0.5 + o.epsilon), m, v)
        decay = optax.add_decayed_weights(o.weight_decay, matrices)
        u, _ = decay.update(u, decay.init(state.params), state.params)
        params = jax.tree.map(lambda p, u: p - rate(count) * u, state.params, u)
        new = dataclasses.replace(state, params=params, moments=moments, step=state.step + 1)
        return new, {"loss": values.mean()}

    return step


def train_text(model: str, way: str, n: int, beta: float, seed: int) -> dict:
    config = text_config(model, way, n, beta, seed)
    t, text = config.train, data.read(config.data.path, config.train.sequence)
    state = init_state(config)
    if way == "packed":
        state = dataclasses.replace(state, moments=packed.init(state.params))
    made = packed_step(config) if way == "packed" else make_step(config)
    step, losses = jax.jit(made, donate_argnums=0), []
    for number in range(1, t.steps + 1):
        rows = data.sample(text.train, t.seed, number, t.batch, t.sequence)
        state, metrics = step(state, models.batch(config, rows, number))
        losses.append(metrics["loss"])
    return {"final": evaluate(config, state, text)["val_loss"], "curve": curve(losses)}


def train_images(way: str, n: int, beta: float, seed: int) -> dict:
    how = "accumulation=scan" if way == "Adam" else f"second_moment={way}"
    config = small_resnet(n, seed, f"optimizer.beta2={beta}", f"optimizer.{how}")
    images = read_images(config)
    state = image_step.init_state(config)
    step, losses = jax.jit(image_step.make_step(config), donate_argnums=0), []
    for number in range(1, config.train.steps + 1):
        state, metrics = step(
            state, image_data.sample(images.train, config.train.seed, number, config.train.batch)
        )
        losses.append(metrics["loss"])
    found = evaluate_images(config, state, images)
    return {"final": found["val_loss"], "accuracy": found["val_accuracy"], "curve": curve(losses)}


def curve(losses) -> list[float]:
    values = [float(x) for x in losses]
    return [round(statistics.fmean(values[i : i + CURVE]), 4) for i in range(0, len(values), CURVE)]


def ways(model: str) -> list[tuple[str, int]]:
    """Adam, and every other way with its number of microbatches."""
    of = [way for way in WAYS if way != "packed" or model.startswith("GPT")]
    adam = COUNTS if model == "ResNet" else (1,)
    return [*(("Adam", n) for n in adam), *itertools.product(of, COUNTS)]


def train(model: str, *case) -> dict:
    return train_images(*case) if model == "ResNet" else train_text(model, *case)


def named(model: str, way: str, n: int, beta: float, seed: int) -> str:
    return f"{model}, beta2 {beta}, {way}, {n}, seed {seed}"


def cell(results: dict, model: str, beta: float, n: int) -> dict:
    """What a model's runs with a beta2 and a number of microbatches ended with, beside Adam's."""
    finals = {
        way: [results[named(model, way, count, beta, seed)]["final"] for seed in SEEDS]
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


def trained(report: Report, seed: int, beta: float, model: str) -> None:
    for case in ways(model):
        report.once(named(model, *case, beta, seed), train, model, *case, beta, seed)


def of_convergence(report: Report) -> dict:
    return {
        f"{model}, beta2 {beta}, N={n}": cell(report.results, model, beta, n)
        for model, beta, n in itertools.product(MODELS, BETAS, COUNTS)
    }


# -- adama_packed

ROWS, COLUMNS, B1, B2 = 1024, 1024, 0.9, 0.95


def first_step(way: Any, gradients: list) -> jax.Array:
    """Every parameter's first step, over the rate."""
    params = jnp.zeros((ROWS, COLUMNS))
    if way == "packed":
        m, v, _ = packed.minibatch(packed.init(params), gradients, B1, B2, jax.random.key(1))
        return jnp.abs(m) / (v**0.5 + 1e-8)
    tx = jaxmem.scale_by_adama(B1, B2, accumulation_steps=len(gradients), second_moment=way)
    state, update = tx.init(params), None
    for g in gradients:
        update, state = tx.update(g, state, params)
    return jnp.abs(jnp.asarray(update))


def longest_step(way: str, n: int) -> dict[str, float]:
    gradients = [jax.random.normal(jax.random.key(i), (ROWS, COLUMNS)) for i in range(n)]
    steps = first_step(way, gradients)
    return {"longest": float(steps.max()), "over twice": float((steps > 2).mean())}


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
    seconds = interleaved(configs["in_place"], [steps], ROUNDS, configs)
    for way in MICROBATCHED:
        report.add(f"{size}, {way}", clock_and_cores(seconds, way, "in_place"))


def of_time(report: Report) -> dict:
    cores = {name: row["cores"]["median"] for name, row in report.results.items()}
    return {"median of cores' work, to accumulation in place": cores}


RESULTS = {
    "adama_convergence": Benchmark(
        itertools.product(SEEDS, BETAS, MODELS), trained, of_convergence
    ),
    "adama_packed": Benchmark(
        [(way, n) for n, way in itertools.product(COUNTS, WAYS)], row=longest_step
    ),
    "adama_time": Benchmark(SIZES, timed, of_time),
}

if __name__ == "__main__":
    measure("adama_training", RESULTS)
