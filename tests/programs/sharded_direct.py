"""Run by test_direct_sharded.py on several CPU devices: how far steps with optax's transformations
are from one device's, as JSON; and what `placed_on_mesh.py` finds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.programs import placed_on_mesh
from tests.shared import meshes, tiny_lm
from tests.shared.compare import farthest

LAYERS, STEPS = 4, 4
TRANSFORMATIONS = {
    "adamw": optax.adamw(0.01, eps=1e-3, weight_decay=0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lamb": optax.lamb(0.01, eps=1e-3),
}


def parameters():
    return tiny_lm.parameters(np.float32, layers=LAYERS, width=16, vocab=32)


def batch(seed):
    return tiny_lm.tokens(2 * jax.device_count(), seed, vocab=32).astype(jnp.int32)


@functools.cache
def alone(name, clip):
    step = tiny_lm.released(TRANSFORMATIONS[name], clip=clip)
    state, call = step.init(parameters()), jax.jit(step)
    for seed in range(STEPS):
        state, metrics = call(state, batch(seed))
    return jax.tree.map(np.asarray, (state, metrics))


def over(mesh, name, clip, divided, persist):
    """Joined state and metrics, and the places of a momentum."""
    step = tiny_lm.released(TRANSFORMATIONS[name], clip=clip, axis_name="data")
    state = step.split(meshes.state(step, parameters(), mesh, divided), persist)
    call = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
    for seed in range(STEPS):
        state, metrics = call(state, meshes.placed(batch(seed), mesh, P("data")))
    stacked = [a for a in jax.tree.leaves(state[1]) if a.ndim == 3]
    places = sorted({f"{a.sharding.memory_kind} {tuple(a.sharding.spec)}" for a in stacked})
    return jax.tree.map(np.asarray, (step.joined(state), metrics)), places


def main():
    mesh = meshes.line()
    found = {}
    for name, clip, divided, persist in (
        ("nesterov", ("norm", 0.1), "nothing", 1),
        ("lamb", None, "nothing", LAYERS),
        ("adamw", ("component", 0.1), "states", 1),
        ("nesterov", ("norm", 0.1), "states", 0),
    ):
        got, places = over(mesh, name, clip, divided, persist)
        label = f"{name} {clip and clip[0]} {divided} {persist}"
        found[label] = {"far": farthest(got, alone(name, clip)), "places": places}
    placed = placed_on_mesh.found(mesh)
    return {"devices": jax.device_count(), "found": found, "placed": placed}
