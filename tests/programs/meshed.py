"""Trains a model of `experiments/` over several meshes in one process:
python -m tests.shared.worker tests.programs.meshed STEPS TEXT SETTINGS ...

Each SETTINGS are overrides of a config, separated by spaces, after the config's name. Returns for
each the losses; how far the parameters moved from the first ones at least, leaf by leaf; the share
of the state's bytes that the first device has; and the compiled bytes of the step and of everything
kept.
"""

import jax
import numpy as np

from experiments.command.load import load
from experiments.running.planning import prepare
from experiments.running.text import TEXT


def trained(steps: int, text: str, name: str, *overrides: str) -> dict:
    config = load(name, [f"data.path={text}", *overrides])
    data, ready = TEXT.read(config), prepare(config)
    with TEXT.within(config):
        state = TEXT.first_state(config, ready.plan)
        first = jax.tree.map(np.asarray, state.params)
        arrays = [a for a in jax.tree.leaves(state) if a.ndim]
        here = sum(a.addressable_shards[0].data.nbytes for a in arrays)
        losses = []
        for number in range(1, steps + 1):
            state, metrics = ready.step(state, TEXT.batch(config, data, number))
            losses.append(float(metrics["loss"]))
        moved = jax.tree.map(lambda a, b: float(abs(np.asarray(a) - b).max()), state.params, first)
        typed = str(jax.typeof(state.params["embedding"]))
    share = here / sum(a.nbytes for a in arrays)
    moved = min(jax.tree.leaves(moved))
    found = {"losses": losses, "moved": moved, "share": share, "type": typed}
    return found | {"bytes": [ready.compiled_bytes, ready.baseline_bytes]}


def main(steps: str, text: str, *settings: str) -> list[dict]:
    return [trained(int(steps), text, *one.split()) for one in settings]
