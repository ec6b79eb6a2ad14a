"""Run by test_zero3.py on several CPU devices, of this process or of several:
ZeRO-3 with the layers' states in host memory, beside the same with resident states.

    python -m tests.shared.worker tests.programs.zero3 MODEL MICROBATCHES STEPS PERSISTS FOLDER
        [PROCESS PROCESSES PORT]

MODEL is "lm", "gpt" or "llama"; PERSISTS are numbers with commas between them, the number of layers
first for the resident state. Writes each trained state into FOLDER, and prints, as JSON, how far it
is from the resident one, and from the same split in device memory.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.shared import meshes, tiny_lm
from tests.shared.compare import farthest, nearest
from tests.shared.meshes import placed
from tests.shared.streamed import on_device

LAYERS, SEQUENCE = 4, 8


def model(kind: str, n: int):
    """A released step, and a function that makes the same parameters in every process."""
    # A larger eps, so that rounding is not magnified where a gradient is nearly zero.
    tx = jaxmem.adamaw_a(0.01, eps=1e-3, weight_decay=0.1, accumulation_steps=n, axis_name="data")
    if kind == "lm":
        make = functools.partial(tiny_lm.parameters, np.float32, layers=LAYERS, width=16, vocab=32)
        return tiny_lm.released(tx), make
    # Models of experiments need packages that the quick test does not: imported here alone.
    from experiments.command.load import load
    from experiments.models import registry
    from tests.experiments.states import parameters

    config = load(
        f"{kind}_nano",
        (f"model.layers={LAYERS}", "model.width=32", "train.loss_chunk=4", "model.loop=stack")
        + (("model.dropout=0",) if kind == "gpt" else ())
        + (f"train.sequence={SEQUENCE}",),
    )
    split = registry.split(config)
    step = jaxmem.released_step(tx, split.embed, split.layer, split.head, layers="blocks")
    return step, lambda: parameters(functools.partial(registry.create, config), shaken=0.02)


def train(mesh, kind: str, n: int, steps: int, persist: int, resident: bool = False):
    """The joined state, whole on each device, as NumPy's arrays; the losses; and the places of the
    layers' arrays.

    persist: how the layers are split.
    resident: whether all of them lie in device memory all the same.
    """
    step, make = model(kind, n)
    state = step.split(meshes.state(step, make(), mesh, "states"), persist)
    if resident:
        state = on_device(state)
    call = jax.jit(step.data_parallel(mesh, "states"), donate_argnums=0)
    losses = []
    for seed in range(steps):
        vocab = 32 if kind == "lm" else 256
        rows = tiny_lm.tokens(2 * n * mesh.size, seed, vocab=vocab, sequence=SEQUENCE)
        state, metrics = call(state, placed(rows.astype(jnp.int32), mesh, P("data")))
        losses.append(float(metrics["loss"]))
    leaves = jax.tree.leaves((state[0]["blocks"], state[1].mu["blocks"], state[1].nu["blocks"]))
    places = sorted({a.sharding.memory_kind for a in leaves})
    state = step.split(step.joined(state), LAYERS)
    everywhere = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))(state)
    return jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), everywhere), losses, places


def created(mesh, persist: int) -> float:
    """How far a state that is made a layer at a time, whole on each device, is from the first one
    that is made whole, joined.
    """
    step, make = model("lm", 1)
    params = jax.tree.map(np.asarray, make())
    layers = params.pop("blocks")
    outer = {k: placed(a, mesh) for k, a in params.items()}
    layer = lambda i: jax.tree.map(lambda a: jnp.asarray(a)[i], layers)
    state = step.joined(step.create(outer, layer, LAYERS, persist))
    here = jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), state)
    return farthest(here, step.init(make()))


def main(kind: str, n: str, steps: str, persists: str, folder: str, *processes: str):
    if processes:
        meshes.join(*map(int, processes))
    mesh = meshes.line()
    save = lambda name, state: np.savez(
        pathlib.Path(folder, f"{name}-{jax.process_index()}.npz"), *jax.tree.leaves(state)
    )
    first = jax.tree.map(np.asarray, model(kind, int(n))[1]())
    found, trained, losses = {}, {}, {}
    for persist in map(int, persists.split(",")):
        trained[persist], losses[persist], places = train(mesh, kind, int(n), int(steps), persist)
        save(persist, trained[persist])
        found[persist] = {"places": places, "moved": nearest(trained[persist][0], first)}
        if processes:
            found[persist]["created"] = created(mesh, persist)
        elif persist < LAYERS:  # the same split, all of it in device memory
            same, *_ = train(mesh, kind, int(n), int(steps), persist, resident=True)
            found[persist]["same"] = farthest(trained[persist], same)
        if LAYERS in trained:
            apart = np.abs(np.array(losses[persist]) / losses[LAYERS] - 1).max()
            far = farthest(trained[persist], trained[LAYERS])
            found[persist]["far"] = max(far, float(apart))
    return {"devices": jax.device_count(), "found": found}
