"""The experiment of a ResNet that classifies images."""

import functools
import math

import jax

from experiments.config.images import ImageConfig
from experiments.data import images
from experiments.data.images import Images
from experiments.errors import DivergedError, InputError
from experiments.models import resnet, sharding
from experiments.running.planning import Ready, unplanned
from experiments.running.run import Experiment
from experiments.steps.images import State, init_state, make_step
from jaxmem.plans import Plan


def read(config: ImageConfig) -> Images:
    """Returns the images. Raises InputError unless the model has as many classes as the images."""
    found = images.read(config.data.path, config.data.size)
    if found.classes != config.model.classes:
        raise InputError(
            f"model.classes: got {config.model.classes}; allowed for {found.source}:"
            f" {found.classes}"
        )
    return found


def says(config: ImageConfig, data: Images) -> str:
    return (
        f"{data.source}: {len(data.train):,} images to train on, {len(data.validation):,} for"
        " validation"
    )


def first_state(config: ImageConfig, _: Plan | None = None) -> State:
    first = functools.partial(init_state, config)
    return jax.jit(first, out_shardings=sharding.shardings(jax.eval_shape(first)))()


def check(config: ImageConfig) -> None:
    """Raises InputError for a mesh that these devices cannot train."""
    if config.mesh.divides:
        sharding.check_rows(config, jax.device_count())


def within(config: ImageConfig):
    return sharding.within(sharding.over(config.mesh))


def step(config: ImageConfig, data: Images) -> Ready:
    state = jax.eval_shape(functools.partial(init_state, config))
    with within(config):
        return unplanned(make_step(config), *sharding.shapes(state, batch_shape(config, data)))


def batch_shape(config: ImageConfig, data: Images) -> dict[str, jax.ShapeDtypeStruct]:
    B = config.train.batch
    return {
        "images": jax.ShapeDtypeStruct((B, *data.shape), "float32"),
        "labels": jax.ShapeDtypeStruct((B,), "int32"),
    }


def batch(config: ImageConfig, data: Images, number: int):
    t = config.train
    rows = functools.partial(images.sample, data.train, t.seed, number, t.batch)
    return sharding.place_rows(rows, batch_shape(config, data))


def evaluate(config: ImageConfig, state: State, data: Images) -> dict[str, float]:
    """Returns the mean loss in nats and the accuracy over evenly spread validation images, with the
    running averages.
    """
    t, logits = config.train, resnet.logits(config)

    def sums(params, statistics, batch):
        scores_BK = logits(params, statistics, batch["images"])
        right_B = scores_BK.argmax(-1) == batch["labels"]
        return resnet.cross_entropy(scores_BK, batch["labels"]).sum(), right_B.sum()

    of_batch = jax.jit(sharding.automatic(sums))
    loss = right = count = 0.0
    for indices in images.windows(data.validation, t.eval_batches, t.batch):
        rows = lambda part, indices=indices: data.validation[indices[part]]
        shape = batch_shape(config.of_size(len(indices)), data)
        placed = sharding.place_rows(rows, shape)
        part_loss, part_right = of_batch(state.params, state.statistics, placed)
        loss, right = loss + float(part_loss), right + float(part_right)
        count += len(indices)
    if not math.isfinite(loss):
        raise DivergedError(
            f"the validation loss is {loss / count} after {t.steps} steps; lower"
            " optimizer.learning_rate"
        )
    return {"val_loss": loss / count, "val_accuracy": right / count}


def told(found: dict) -> dict[str, str]:
    return {
        "validation loss": f"{found['val_loss']:.4f} nats",
        "accuracy": f"{found['val_accuracy']:.4f}",
    }


IMAGES = Experiment(
    check=check,
    read=read,
    says=says,
    first_state=first_state,
    step=step,
    batch=batch,
    evaluate=evaluate,
    told=told,
    within=within,
    unit="images",
    count=lambda config: config.train.batch,
    remedy="lower optimizer.learning_rate",
)
