"""The experiment of fine-tuning a BERT on a GLUE task, with GLUE's metrics."""

import dataclasses
import functools
import math

import jax
import numpy as np

from experiments.config.glue import GlueConfig
from experiments.config.glue_tasks import TASKS
from experiments.data import glue, tokens
from experiments.data.glue import Examples
from experiments.errors import DivergedError
from experiments.models import glue as model
from experiments.models import registry as models
from experiments.models import sharding
from experiments.running.glue_metrics import measure
from experiments.running.planning import check_run, prepare
from experiments.running.run import Experiment
from experiments.steps import step
from experiments.steps.step import State
from jaxmem.plans import Plan


@dataclasses.dataclass(frozen=True)
class Task:
    """The examples of a task: for training, and for validation by file."""

    train: Examples
    validation: dict[str, Examples]


def read(config: GlueConfig) -> Task:
    path, task = config.data.path, config.data.task
    examples = glue.read(path, task, "train")
    return Task(examples, {side: glue.read(path, task, side) for side in TASKS[task].dev})


def says(config: GlueConfig, data: Task) -> str:
    held_out = sum(map(len, data.validation.values()))
    return (
        f"{config.data.task} ({config.data.path}): {len(data.train):,} examples to train on,"
        f" {held_out:,} for validation"
    )


def first_state(config: GlueConfig, _: Plan | None, pretrained: dict | None = None) -> State:
    state = step.first_state(config)
    if pretrained is None:
        return state
    params = model.onto(state.params, pretrained)
    return dataclasses.replace(state, params=jax.device_put(params, sharding.shardings(params)))


def batch(config: GlueConfig, data: Task, number: int) -> dict[str, np.ndarray]:
    t = config.train
    rows = lambda part: tokens.sample(data.train, t.seed, number, t.batch, t.sequence, part)
    return sharding.place_rows(rows, models.batch_shape(config))


def evaluate(config: GlueConfig, state: State, data: Task) -> dict:
    """Returns the mean loss (in nats, or squared scores) and the task's metrics of each validation
    file, over all examples, without dropout. `val_loss` is the loss of the first file.
    """
    scores = jax.jit(sharding.automatic(model.scores(config)))
    found = {
        side: _measured(config, scores, state.params, examples)
        for side, examples in data.validation.items()
    }
    return {"val_loss": found[TASKS[config.data.task].dev[0]]["loss"], "validation": found}


def _measured(config: GlueConfig, scores, params: dict, examples: Examples) -> dict[str, float]:
    t, task = config.train, TASKS[config.data.task]

    def scored(indices: np.ndarray) -> np.ndarray:
        rows = lambda part: tokens.batch(examples, indices[part], t.sequence)
        shape = models.batch_shape(config.of_size(len(indices)))
        return scores(params, sharding.place_rows(rows, shape))

    scores_NK = np.concatenate([*map(scored, tokens.windows(examples, t.batch))])
    loss = float(model.losses(task, scores_NK, examples.labels).mean())
    if not math.isfinite(loss):
        raise DivergedError(
            f"the validation loss is {loss} after {t.steps} steps; lower optimizer.learning_rate"
        )
    predicted_N = scores_NK.argmax(-1) if task.labels else scores_NK[:, 0]
    assert examples.labels is not None, "no test file is measured"
    return {"loss": loss} | measure(task, examples.labels, predicted_N)


def told(found: dict) -> dict[str, str]:
    return {
        side: ", ".join(f"{name} {value:.4f}" for name, value in measured.items())
        for side, measured in found["validation"].items()
    }


def glue_experiment(pretrained: dict | None = None) -> Experiment[GlueConfig, Task]:
    """`pretrained`: the parameters of a BERT to start from, in the form of
    `models.registry.create`.
    """
    return Experiment(
        check=check_run,
        read=read,
        says=says,
        first_state=functools.partial(first_state, pretrained=pretrained),
        step=lambda config, _: prepare(config),
        batch=batch,
        evaluate=evaluate,
        told=told,
        within=lambda config: sharding.within(sharding.over(config.mesh)),
        unit="examples",
        count=lambda config: config.train.batch,
        remedy="lower optimizer.learning_rate, or clip tighter (optimizer.clip_at)",
    )


GLUE = glue_experiment()
