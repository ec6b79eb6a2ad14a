"""The experiment of a GPT, a Llama or a BERT on text."""

import functools
import math
from typing import Any

import jax

from experiments.config.text import CAUSAL, Config
from experiments.data import text
from experiments.data.text import Text
from experiments.errors import DivergedError
from experiments.models import registry as models
from experiments.models import sharding
from experiments.models.loops import stacked
from experiments.running.planning import check_run, prepare
from experiments.running.run import Experiment
from experiments.running.sample import sample
from experiments.steps.step import State, divided_state, first_state, make_loss
from jaxmem.plans import Plan

SHOWN = 60  # characters of a sample on a terminal


def read(config: Config) -> Text:
    return text.read(config.data.path, config.train.sequence)


def says(config: Config, data: Text) -> str:
    return (
        f"{data.source}: {len(data.train):,} bytes to train on, {len(data.validation):,} for"
        " validation"
    )


def first(config: Config, plan: Plan | None) -> State:
    """Returns the first state, in the memories and on the devices that the plan chose."""
    if plan is None or plan.divided is None:
        return first_state(config.placed_by(plan))
    return divided_state(config, plan)


def batch(config: Config, data: Text, number: int):
    t = config.train
    read = functools.partial(text.sample, data.train, t.seed, number, t.batch, t.sequence)
    if config.model.kind not in CAUSAL:  # the draws of a row depend on the rows before it
        return sharding.place_whole(models.batch(config, read(), number))
    rows = lambda part: models.batch(config, read(part=part), number)
    return sharding.place_rows(rows, models.batch_shape(config))


def evaluate(config: Config, state: State, data: Text) -> dict[str, float]:
    """Returns the mean validation loss in nats per prediction, over evenly spread windows, without
    dropout.
    """
    # jaxmem's loop reads layers from any memory.
    loop = stacked() if config.streams else None
    t, loss = config.train, jax.jit(sharding.automatic(make_loss(config, loop)))
    batches = text.windows(data.validation, t.eval_batches, t.batch, t.sequence)
    values = [
        float(loss(state.params, sharding.place_whole(models.batch(config, rows, i))))
        for i, rows in enumerate(batches)
    ]
    value = sum(values) / len(values)
    if not math.isfinite(value):
        raise DivergedError(
            f"the validation loss is {value} after {t.steps} steps; lower optimizer.learning_rate"
        )
    return {"val_loss": value}


def ended(config: Config, state: State, data: Text) -> dict[str, Any]:
    """Returns the results of `evaluate`, and a sample of a causal model."""
    found: dict[str, Any] = evaluate(config, state, data)
    return found | ({"sample": sample(config, state.params)} if config.sampled else {})


def told(found: dict[str, Any]) -> dict[str, str]:
    shown = {"validation loss": f"{found['val_loss']:.4f} nats a byte"}
    if "sample" in found:
        begin = found["sample"][:SHOWN]
        shown["sample"] = repr(begin) + ("…" if begin != found["sample"] else "")
    return shown


TEXT = Experiment(
    check=check_run,
    read=read,
    says=says,
    first_state=first,
    step=lambda config, _: prepare(config),
    batch=batch,
    evaluate=ended,
    told=told,
    within=lambda config: sharding.within(sharding.over(config.devices)),
    unit="tokens",
    count=lambda config: config.train.batch * config.train.sequence,
    remedy="lower optimizer.learning_rate, or clip tighter (optimizer.clip_at)",
)
