"""python -m experiments.train_images CONFIG [section.key=value ...] --out DIR: trains a ResNet,
evaluates it.

Writes DIR/metrics.jsonl (a row a step) and DIR/summary.json. Exit codes: 0; 2 for input that cannot
be used; 3 where the loss is no longer finite; 130 where interrupted (the summary then tells of the
steps done).
"""

import functools
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Sequence

import jax

from experiments.command import cli
from experiments.command.load import load
from experiments.config.images import ImageConfig
from experiments.data import images as image_data
from experiments.errors import DivergedError, InputError
from experiments.models import resnet
from experiments.running.record import (
    Progress,
    check_folder,
    course,
    recording,
    results,
    write_json,
)
from experiments.steps.images import State, init_state, make_step


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(
        "experiments.train_images", "Train a ResNet to classify images, then evaluate it."
    )
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        name = pathlib.Path(args.config).stem
        config = cli.in_its_dtype(load(args.config, args.overrides, ImageConfig))
        out = check_folder(args.out or pathlib.Path("runs") / name)
        command = [
            "python",
            "-m",
            "experiments.train_images",
            args.config,
            *args.overrides,
            "--out",
            str(out),
        ]
        train(name, config, out, shlex.join(command))

    return cli.exit_code(work)


def train(name: str, config: ImageConfig, out: pathlib.Path, command: str | None = None) -> dict:
    """The whole run; returns what summary.json says, `command`, which makes it again, included."""
    images = read(config)
    sizes = f"{len(images.train):,} images to train on, {len(images.validation):,} for validation"
    print(f"{images.source}: {sizes}", file=sys.stderr)
    with results(out):
        rows: list[dict] = []
        found, stopped = {"val_loss": None, "val_accuracy": None}, None
        begun = time.perf_counter()
        try:
            state = loop(config, images, rows, out / "metrics.jsonl")
            found = evaluate(config, state, images)
        except KeyboardInterrupt as error:
            stopped = error
        summary = _summary(name, config, images, rows) | found
        summary |= {
            "seconds": time.perf_counter() - begun,
            "interrupted": stopped is not None,
            "command": command,
        }
        write_json(out / "summary.json", summary)
        if stopped is not None:
            raise stopped
    accuracy = f"accuracy {found['val_accuracy']:.4f}"
    print(
        f"validation loss {found['val_loss']:.4f} nats, {accuracy}; results in {out}",
        file=sys.stderr,
    )
    return summary


def read(config: ImageConfig) -> image_data.Images:
    """The experiment's images, if its model has their classes."""
    images = image_data.read(config.data.path, config.data.size)
    if images.classes != config.model.classes:
        raise InputError(
            f"model.classes: got {config.model.classes}; allowed for {images.source}:"
            f" {images.classes}"
        )
    return images


def loop(
    config: ImageConfig, images: image_data.Images, rows: list[dict], path: pathlib.Path
) -> State:
    """Trains from the first state; appends to `rows` and to the file at `path`, a step behind the
    device.
    """
    state, step = (
        jax.jit(functools.partial(init_state, config))(),
        jax.jit(make_step(config), donate_argnums=0),
    )
    t = config.train
    progress = Progress(t.steps, t.log_every, 0)  # its speed is in tokens

    with recording(path, rows, progress, "lower optimizer.learning_rate") as behind:
        for number in range(1, t.steps + 1):
            state, metrics = step(state, image_data.sample(images.train, t.seed, number, t.batch))
            behind(number, metrics)
    return state


def evaluate(config: ImageConfig, state: State, images: image_data.Images) -> dict[str, float]:
    """Mean loss in nats and accuracy over validation images spread evenly, by the running averages."""
    t, logits = config.train, resnet.logits(config)

    @jax.jit
    def sums(batch):
        scores_BK = logits(state.params, state.statistics, batch["images"])
        right_B = scores_BK.argmax(-1) == batch["labels"]
        return resnet.cross_entropy(scores_BK, batch["labels"]).sum(), right_B.sum()

    loss = right = count = 0.0
    for batch in image_data.windows(images.validation, t.eval_batches, t.batch):
        batch_loss, batch_right = sums(batch)
        loss, right, count = (
            loss + float(batch_loss),
            right + float(batch_right),
            count + len(batch["labels"]),
        )
    if not math.isfinite(loss):
        raise DivergedError(
            f"the validation loss is {loss / count} after {t.steps} steps; lower"
            " optimizer.learning_rate"
        )
    return {"val_loss": loss / count, "val_accuracy": right / count}


def _summary(name: str, config: ImageConfig, images: image_data.Images, rows: list[dict]) -> dict:
    return {
        "config": name,
        "settings": config.model_dump(),
        "source": images.source,
        **course(rows),
        "jax_version": jax.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
