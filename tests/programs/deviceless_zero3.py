"""Run by test_streamed_sharded.py in a compiler's environment: what a ZeRO-3 step whose states
stream moves, over GPUs that are not there, as JSON.

python -m tests.shared.worker tests.programs.deviceless_zero3 GPU DEVICES PERSIST MICROBATCHES

Of one microbatch or two no loop is made, so that all loops are over layers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._target.compiled.compiled import read_compiled
from jaxmem._target.hlo.text import HloModule
from jaxmem._target.hlo.transfers import fault
from tests.shared import deviceless, meshes, tiny_lm
from tests.shared.streamed import host_bytes

LAYERS, WIDTH, VOCAB = 6, 256, 512
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")


def collectives(text: str) -> list[dict]:
    """Each collective in a loop over layers: its name, its dtypes, the bytes of its whole arrays,
    and how often it runs.
    """
    module = HloModule(text)
    found = []

    def walk(name: str, runs: int, looped: bool):
        for i in module.body(name):
            called = i.called if i.opcode in ("while", "call", "conditional") else []
            # An asynchronous one is a computation of its own, or an opcode that ends in "-start".
            if i.opcode == "async-start":
                called = i.called
            for inner in called:
                # The loop of the last microbatch is one of a single turn.
                walk(inner, runs * i.trips, looped or i.trips > 1)
            kind = i.opcode.removesuffix("-start")
            if kind in COLLECTIVES and looped:
                arrays = {*i.operands, *i.results}
                whole = max(sum(a.nbytes for a in side) for side in (i.operands, results_of(i)))
                dtypes = sorted({a.dtype for a in arrays})
                found.append({"kind": kind, "dtypes": dtypes, "nbytes": whole, "runs": runs})

    walk(module.entry, 1, False)
    return found


def results_of(i):
    """The arrays that a collective makes: a start's results begin with its operands."""
    return i.results[len(i.operands) :] if i.opcode.endswith("-start") else i.results


def main(gpu: str, *numbers: str):
    devices, persist, n = map(int, numbers)
    gpus = deviceless.devices(gpu, devices)
    mesh = Mesh(np.array(gpus), ("data",), axis_types=(AxisType.Auto,))
    tx = jaxmem.adama(1e-3, accumulation_steps=n, axis_name="data")
    step = tiny_lm.released(tx, plan=Assignment({"block": {}}), dtype=jnp.bfloat16)
    params = tiny_lm.parameters(np.float32, layers=LAYERS, width=WIDTH, vocab=VOCAB)
    shapes = meshes.state(step, params, mesh.abstract_mesh, "states", meshes.shape)
    state = step.split(shapes, persist)

    # Devices that are not there list no memories: what lies in device memory is on them, and what
    # lies in host memory on the mesh without its devices.
    def there(a):
        on_host = a.sharding.memory_kind == "pinned_host"
        return a if on_host else meshes.shape(a, mesh, a.sharding.spec)

    batch = jax.ShapeDtypeStruct((4 * n * devices, 33), np.int32)
    args = jax.tree.map(there, state), meshes.shape(batch, mesh, P("data"))
    call = jax.jit(step.data_parallel(mesh, "states"), donate_argnums=0)
    compiled = call.trace(*args).lower().compile()
    read = read_compiled(compiled, 0.0)
    return {
        "host_bytes": read.host_bytes,
        "part": host_bytes(state) // devices,
        "fault": fault(read.transfers),
        "layer": sum(math.prod(a.shape[1:]) for a in jax.tree.leaves(shapes[0]["blocks"])),
        "collectives": collectives(compiled.as_text()),
    }
