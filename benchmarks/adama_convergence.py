"""Final losses of AdamA with 2, 4 and 8 microbatches beside Adam's, over seeds, with the second
moment of the paper and with the row ratio (AdamA, Fig. 2 and 3; M6, M7).

    python -m benchmarks.adama_convergence

A GPT on two texts and a BERT, two layers of width 64, 250 steps of 32 sequences of 32 bytes; a
ResNet of 14 layers on scikit-learn's digits, 200 steps of 64 images. The texts are Python's
standard library, and the C headers of Python. Each with beta2 of 0.95 and 0.999, at Adam's rate.

Adam takes the mean of the same microbatches: in the GPT and the BERT that is the batch's gradient,
and Adam takes the batch at once; in the ResNet, whose batch norm sees a microbatch, they are added
up. AdamA's steps are released in the GPT and the BERT, and the unreleased transformation in the
ResNet. `packed` is the other way to Adam's second moment without a buffer
(`benchmarks/shared/packed.py`), for the GPT alone. The spread of seeds is Adam's largest final loss
less its smallest; a difference is of means.
"""

import dataclasses
import itertools
import statistics
import sysconfig

import jax
import optax

from benchmarks.shared import packed
from benchmarks.shared.case import small_resnet
from benchmarks.shared.results import Report
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


def run(report: Report, seed: int, beta: float, model: str) -> None:
    for case in ways(model):
        report.once(named(model, *case, beta, seed), train, model, *case, beta, seed)


def summary(report: Report) -> dict:
    return {
        f"{model}, beta2 {beta}, N={n}": cell(report.results, model, beta, n)
        for model, beta, n in itertools.product(MODELS, BETAS, COUNTS)
    }


def main() -> None:
    cases = itertools.product(SEEDS, BETAS, MODELS)
    Report("adama_convergence").for_each(cases, run, summary)


if __name__ == "__main__":
    main()
