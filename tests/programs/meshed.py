"""Trains a model of `experiments/` over several meshes in one process:
python -m tests.shared.worker tests.programs.meshed STEPS SETTINGS ...

Each SETTINGS are overrides of a config, separated by spaces, after the config's name. Returns for
each the losses; what the evaluation found; how far the parameters moved from the first ones at
least, leaf by leaf; the share of the state's bytes that the first device has; and the compiled
bytes of the step and of everything kept. Of a ResNet, only the first stage's first block remains,
since compiling takes most of the time.
"""

import jax
import numpy as np

from experiments.command.load import load
from experiments.config.glue import GlueConfig
from experiments.config.images import ImageConfig
from experiments.config.text import Config
from experiments.models import resnet
from experiments.running import text
from experiments.running.glue import GLUE
from experiments.running.images import IMAGES
from experiments.running.text import TEXT

KINDS = {"bert_glue": (GLUE, GlueConfig), "resnet50_digits": (IMAGES, ImageConfig)}


def trained(steps: int, name: str, *overrides: str) -> dict:
    experiment, schema = KINDS.get(name, (TEXT, Config))
    config = load(name, overrides, schema)
    experiment.check(config)
    data = experiment.read(config)
    ready = experiment.step(config, data)
    with experiment.within(config):
        state = experiment.first_state(config, ready.plan)
        first = jax.tree.map(np.asarray, state.params)
        arrays = [a for a in jax.tree.leaves(state) if a.ndim]
        here = sum(a.addressable_shards[0].data.nbytes for a in arrays)
        losses = []
        for number in range(1, steps + 1):
            state, metrics = ready.step(state, experiment.batch(config, data, number))
            losses.append(float(metrics["loss"]))
        moved = jax.tree.map(lambda a, b: float(abs(np.asarray(a) - b).max()), state.params, first)
        typed = str(jax.typeof(max(jax.tree.leaves(state.params), key=lambda a: a.size)))
        evaluate = text.evaluate if experiment is TEXT else experiment.evaluate  # no sample
        found = evaluate(config, state, data)
    share = here / sum(a.nbytes for a in arrays)
    moved = min(jax.tree.leaves(moved))
    told = {"losses": losses, "moved": moved, "share": share, "type": typed, "found": found}
    return told | {"bytes": [ready.compiled_bytes, ready.baseline_bytes]}


def main(steps: str, *settings: str) -> list[dict]:
    resnet.STAGES[14] = (1,)
    return [trained(int(steps), *one.split()) for one in settings]
