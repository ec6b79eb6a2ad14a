"""States that lie whole on a mesh are split, with copies, buffers and moments in host memory, and
stepped with states divided: how far the parameters are from unsplit ones. `sharded_direct.py`
prints it beside its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from tests.shared import tiny_lm
from tests.shared.compare import farthest, nearest

PLACES = ({}, {"persist": 1}, {"persist": 0, "copies": 2, "outer_moments": "pinned_host"})


def stepped(mesh, step, how):
    """The layers' parameters after a step."""
    params = tiny_lm.parameters(np.float32, layers=3)
    state = step.init(jax.device_put(params, NamedSharding(mesh, PartitionSpec())))
    state = step.split(state, **how) if how else state
    call = jax.jit(step.data_parallel(mesh, "states"))
    state, _ = call(state, tiny_lm.tokens(8).astype(jnp.int32))
    return jax.tree.map(np.asarray, step.joined(state)[0]["blocks"])


def found(mesh) -> dict:
    """By the optimizer: how far the parameters moved, and how far each split is from none."""
    steps = {
        "adama": tiny_lm.released(jaxmem.adama(0.01, axis_name="data")),
        "lion": tiny_lm.released(optax.lion(0.01), axis_name="data"),
    }
    found = {}
    for name, step in steps.items():
        want, *others = (stepped(mesh, step, how) for how in PLACES)
        start = tiny_lm.parameters(np.float32, layers=3)["blocks"]
        far = [farthest(got, want) for got in others]
        found[name] = {"moved": nearest(want, start), "far": far}
    return found
