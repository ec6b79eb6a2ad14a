"""Run by test_released_sharded.py in a compiler's environment: collectives of AdamA over GPUs that
are not there, as JSON.

python -m tests.shared.worker tests.programs.deviceless_adama DEVICES ...
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.shared import deviceless, meshes, tiny_lm
from tests.shared.executed import executed

KINDS = ("all-reduce", "reduce-scatter", "all-gather")
WIDTH, VOCAB = 128, 512


def counts(mesh, n: int, divided: str) -> dict:
    step = tiny_lm.released(jaxmem.adama(1e-3, accumulation_steps=n, axis_name="data"))
    params = tiny_lm.parameters(np.float32, width=WIDTH, vocab=VOCAB)
    state = meshes.state(step, params, mesh, divided, meshes.shape)
    batch = jax.ShapeDtypeStruct((8 * mesh.size, 33), np.int32)
    call = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
    traced = call.trace(state, meshes.shape(batch, mesh, P("data")))
    opcodes = (*KINDS, *(f"{kind}-start" for kind in KINDS))
    found = executed(traced.lower().compile().as_text(), opcodes)
    return {kind: found[kind] + found[f"{kind}-start"] for kind in KINDS}


def main(*numbers):
    found = {}
    for devices in map(int, numbers):
        gpus = deviceless.devices(count=devices)
        mesh = Mesh(np.array(gpus), ("data",), axis_types=(AxisType.Auto,))
        for divided in ("nothing", "moments"):
            for n in (2, 8):
                found[f"{devices} {divided} {n}"] = counts(mesh, n, divided)
    return found
