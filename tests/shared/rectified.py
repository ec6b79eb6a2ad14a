"""A step whose batch determines the outlier channels, and runs of this step with a rectifier."""

import json

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem._train.rectifier.decide import rooms_of
from jaxmem.runs import Rectifier, record, train
from tests.shared import outlier_layers
from tests.shared.outlier_layers import HIDDEN, batch, parameters

# At first two channels are outliers by chance; from step LOUD on, four channels are outliers.
ASKED = {"actions": ["recompute", "compress"], "codecs": "outlier_separated(capacity=2)"}
LOUD, STEPS = 10, 24


def capacities(actions):
    """Returns the capacity of each codec that separates outliers."""
    return {(block, tag): room for block, tag, room, _ in rooms_of(actions, ())}


def build(plan):
    """Returns a step whose batch determines the size of the channels of its only tag."""

    def step(p, batch):
        x, loud = batch

        def block(x, p):
            up = jaxmem.tag(x @ p["up"] * loud, "up", kind="linear") / loud
            return x + jnp.tanh(up) * up @ p["down"]

        return outlier_layers.build(plan, block)(p, x)

    return step


def data(number):
    loud = jnp.ones(HIDDEN).at[jnp.arange(2)].set(20.0)
    return batch(64, seed=number), loud.at[jnp.arange(4)].set(20.0) if number >= LOUD else loud


class Waiting(Rectifier):
    """A rectifier whose plans are ready after the step that requested them, so that the rows of
    every run are equal.
    """

    def ready(self, number, left):
        if self._made is not None:
            self._made.exception()
        return super().ready(number, left)


def rectifier(plan, kind=Waiting, **more):
    return kind(plan, build, parameters(()), data(1), **({"every": 4} | ASKED | more))


def run(out, plan, revising, stop=None, step=None, steps=STEPS, **more):
    def asked(number):
        if number == stop:
            raise KeyboardInterrupt
        return data(number)

    with record(out, resume=True) as found:
        # A run that stops is saved after each step; other runs are saved at their end.
        more = {"save_every": 1e9 if stop is None else 0, "rectifier": revising} | more
        first = lambda: parameters(())
        state = train(step or plan.step, first, asked, steps=steps, run=found, **more)
        found.summary({"config": "a run"})
    return state


def planned(budget, **more):
    """A plan of the step."""
    with jax.numpy_dtype_promotion("standard"):
        return jaxmem.plan(build, parameters(()), data(1), budget=budget, **more)


def lines(out, name):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]
