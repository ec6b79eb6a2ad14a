"""Final losses of AdamA with 2, 4 and 8 microbatches beside Adam's, over seeds (AdamA, Fig. 2 and
3; M6, M7).

    python -m benchmarks.adama_convergence

A GPT and a BERT on text, two layers of width 64, 250 steps of 32 sequences of 32 bytes; a ResNet of
14 layers on scikit-learn's digits, 200 steps of 64 images. Adam takes the batch at once. AdamA's
steps are released in the GPT and the BERT, and the unreleased transformation in the ResNet. The
spread of seeds is Adam's largest final loss less its smallest; a difference is of means.
"""

import statistics

import jax

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
from experiments.steps.step import init_state, make_step

SEEDS, WAYS = (0, 1, 2), ("Adam", 2, 4, 8)
SMALL = (
    "model.layers=2", "model.width=64", "model.heads=4", "model.dropout=0.0",
    "model.attention_dropout=0.0", "plan.budget=none", "train.steps=250", "train.batch=32",
    "train.sequence=32", "train.loss_chunk=32", "optimizer.clip=none",
)  # fmt: skip
TEXTS = {"GPT": (), "BERT": ("model.kind=bert", "model.vocab=257")}
CURVE = 20  # steps to a point


def text_config(model: str, way, seed: int) -> Config:
    adama = ("optimizer.accumulation=released", "model.loop=stack", f"train.microbatches={way}")
    overrides = [*SMALL, *TEXTS[model], f"train.seed={seed}", *(() if way == "Adam" else adama)]
    return load("gpt_nano", overrides)


def train_text(model: str, way, seed: int) -> dict:
    config = text_config(model, way, seed)
    t, text = config.train, data.read(None, config.train.sequence)
    state, step, losses = init_state(config), jax.jit(make_step(config), donate_argnums=0), []
    for number in range(1, t.steps + 1):
        rows = data.sample(text.train, t.seed, number, t.batch, t.sequence)
        state, metrics = step(state, models.batch(config, rows, number))
        losses.append(metrics["loss"])
    return {"final": evaluate(config, state, text)["val_loss"], "curve": curve(losses)}


def train_images(way, seed: int) -> dict:
    config = small_resnet(way, seed)
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


def main() -> None:
    report = Report("adama_convergence")
    for seed in SEEDS:
        for model in (*TEXTS, "ResNet"):
            for way in WAYS:
                if not report.has(key := f"{model}, {way}, seed {seed}"):
                    report.add(
                        key,
                        train_images(way, seed)
                        if model == "ResNet"
                        else train_text(model, way, seed),
                    )
    rows, summary = report.results, {}
    for model in (*TEXTS, "ResNet"):
        finals = {
            way: [rows[f"{model}, {way}, seed {seed}"]["final"] for seed in SEEDS] for way in WAYS
        }
        spread = max(finals["Adam"]) - min(finals["Adam"])
        means = {way: statistics.fmean(values) for way, values in finals.items()}
        differences = {f"N={n}": means[n] - means["Adam"] for n in WAYS[1:]}
        within = {name: abs(d) <= spread for name, d in differences.items()}
        summary[model] = {
            "Adam": means["Adam"],
            "spread": spread,
            "AdamA less Adam": differences,
            "within": within,
        }
    report.summarise(summary)


if __name__ == "__main__":
    main()
