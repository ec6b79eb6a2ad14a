"""Runs the small training of tests/programs/durable_run.py, and reads the results."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.runs import record, train
from tests.programs import durable_run


def rows(folder):
    """Returns the rows without measured times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "step_seconds"} for line in lines]


def unfinished(out):
    (path,) = out.glob("unfinished-*")
    return path


def checkpoints(path):
    """Returns the numbers of complete checkpoints. An incomplete checkpoint has another name."""
    return sorted(int(p.parent.name) for p in path.glob("checkpoints/[0-9]*/manifest.json"))


class Stop(Exception):
    """The error that ends a run from within."""


def run(out, steps=8, stop=None, data=durable_run.batch, step=durable_run.step, **given):
    """Trains. `stop` is a step's number and an error, raised when that step's batch is read."""

    def asked(number):
        if stop is not None and number == stop[0]:
            raise stop[1]
        return data(number)

    # A fixture of a module runs without the suite's settings of promotion, and so sets its own.
    with jax.numpy_dtype_promotion("standard"), record(out, resume=True) as found:
        given = {"save_every": 0, "keep": 3} | given
        state = train(step, durable_run.first, asked, steps=steps, run=found, **given)
        found.summary({"config": "a run"})
    return durable_run.digest(state)


def fails_at(out, at, **given):
    """Trains until the batch of step `at` is read."""
    with pytest.raises(Stop):
        run(out, stop=(at, Stop()), **given)


def worse(*numbers):
    def batch(number):
        one = durable_run.batch(number)
        return one | {"scale": np.float32("inf")} if number in numbers else one

    return batch


def stopped(out, step, state, data=jnp.float32, at=4, steps=6, **given):
    """Returns the last states of a run that fails at `at` and resumes, and of a run that does not
    fail.
    """
    found = []
    for folder, fails in (("failing", at), ("failing", None), ("whole", None)):

        def batch(number, fails=fails):
            if number == fails:
                raise Stop
            return data(number)

        # Only the failing run is saved after each step.
        arguments = {"steps": steps, "save_every": 0 if fails else 1e9} | given
        try:
            with jax.numpy_dtype_promotion("standard"), record(out / folder, resume=True) as run:
                found.append(train(step, state, batch, run=run, **arguments))
        except Stop:
            assert fails
    return found


def alike(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.result_type(x) == jnp.result_type(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


class Numbers:
    """An iterator of batches that tells where it is, as a dict or as bytes."""

    def __init__(self, at=0, batch=durable_run.batch, kind=dict):
        self.at, self.batch, self.kind = at, batch, kind

    def __next__(self):
        self.at += 1
        return self.batch(self.at)

    def get_state(self):
        return str(self.at).encode() if self.kind is bytes else {"at": self.at}

    def set_state(self, state):
        self.at = int(state) if self.kind is bytes else state["at"]
