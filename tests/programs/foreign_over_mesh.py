"""Run by test_loss_sharded.py on several CPU devices: how far released steps of the losses of
test_loss.py over a mesh are from `jax.grad` and the optimizer in one piece, as JSON.

python -m tests.shared.worker tests.programs.foreign_over_mesh DIVIDED
"""

import jax
import numpy as np
import optax

import jaxmem
from tests.released import test_loss
from tests.shared import meshes
from tests.shared.compare import farthest

jax.config.update("jax_enable_x64", True)
STEPS = 2


def wanted(loss, params, batch, keys):
    devices, tx = jax.device_count(), test_loss.adam()
    parts = jax.tree.map(lambda a: a.reshape(devices, -1, *a.shape[1:]), batch)
    each = [jax.random.split(key, devices) for key in keys]

    def mean(params):
        of = lambda d: loss(params, jax.tree.map(lambda a: a[d], parts), *(key[d] for key in each))
        return sum(map(of, range(devices))) / devices

    state, gradient = tx.init(params), jax.jit(jax.grad(mean))
    for _ in range(STEPS):
        updates, state = tx.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def main(divided):
    mesh, found = meshes.line(), {}
    for name in test_loss.MODELS:
        loss, params, (batch, *keys) = test_loss.model(name)
        step = jaxmem.released_step(test_loss.adam(), loss, axis_name="data")
        bound = step.of(params, batch, *keys)
        state = step.init(params, batch, *keys)
        specs = bound.specs(params, mesh.shape["data"], divided)
        state = jax.tree.map(lambda a, spec: meshes.placed(a, mesh, spec), state, specs)
        run = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
        for _ in range(STEPS):
            state, _ = run(state, batch, *keys)
        numbers = lambda tree: jax.tree.map(lambda a: np.asarray(a, np.float64), tree)
        got = numbers(state[0])
        found[name] = {
            "far": farthest(got, numbers(wanted(loss, params, batch, keys))),
            "moved": farthest(got, numbers(params)),
        }
    return {"devices": jax.device_count(), "found": found}
