"""Run by test_released_sharded.py in a compiler's environment: collectives of AdamA over GPUs that
are not there, as JSON.

python -m tests.programs.deviceless_adama DEVICES ...
"""

import functools
import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.shared import deviceless, tiny_lm
from tests.shared.executed import executed

OPCODES = (
    "all-reduce",
    "all-reduce-start",
    "reduce-scatter",
    "reduce-scatter-start",
    "all-gather",
    "all-gather-start",
)
WIDTH, VOCAB = 128, 512


def counts(mesh, n: int, divided: str) -> dict:
    step = tiny_lm.released(jaxmem.adama(1e-3, accumulation_steps=n, axis_name="data"))
    make = functools.partial(tiny_lm.parameters, np.float32, width=WIDTH, vocab=VOCAB)
    state = jax.eval_shape(lambda: step.init(make()))
    place = lambda a, spec: jax.ShapeDtypeStruct(
        a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
    )
    devices = mesh.shape["data"]
    args = jax.tree.map(place, state, step.specs(state[0], devices, divided))
    batch = jax.ShapeDtypeStruct((8 * devices, 33), np.int32)
    call = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
    text = call.trace(args, place(batch, P("data"))).lower().compile().as_text()
    found = executed(text, OPCODES)
    return {
        name: found[name] + found[f"{name}-start"] for name in OPCODES if not name.endswith("start")
    }


def main():
    found = {}
    for devices in map(int, sys.argv[1:]):
        gpus = deviceless.devices(count=devices)
        mesh = Mesh(np.array(gpus), ("data",), axis_types=(AxisType.Auto,))
        for divided in ("nothing", "moments"):
            for n in (2, 8):
                found[f"{devices} {divided} {n}"] = counts(mesh, n, divided)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
