"""A run of several processes that is stopped and goes on:
python -m tests.programs.durable_together OUT STEPS [NUMBER COUNT PORT].

Its arithmetic does not depend on how arrays are divided, so that its rows and its last state are
the same over any number of devices and processes. Each process prints the steps that it has done,
and the digest of the last state. `DIVIDE` is the axis along which the largest array is divided,
`KIND` the memory of another, `PAUSE` the seconds that each batch takes; process `FULL` can write no
more than 2000 bytes to a file from step 4 on, process `FAILS` fails there, and a folder that is
shared is waited for for `SHOWN` seconds. The losses of the steps `WORSE` are not finite.
"""

import hashlib
import os
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._train.runs import folder
from tests.shared import meshes

ROWS, COLUMNS = 64, 32


def placed(*axes, kind=None) -> NamedSharding:
    return NamedSharding(meshes.line(name="all"), P(*axes), memory_kind=kind)


def laid(array: np.ndarray, place: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])


def first():
    axes = ("all", None) if os.environ.get("DIVIDE", "0") == "0" else (None, "all")
    rng = np.random.default_rng(0)
    return {
        "w": laid(rng.standard_normal((ROWS, COLUMNS)).astype(np.float32), placed(*axes)),
        "half": laid(np.arange(ROWS).astype(jnp.bfloat16), placed("all")),
        "b": laid(np.ones(COLUMNS, np.float32), placed()),
        "host": laid(
            np.arange(ROWS, dtype=np.float32),
            placed("all", kind=os.environ.get("KIND", "pinned_host")),
        ),
        "done": jnp.int32(0),  # which lies on one device, until a step has made it
        "key": jax.jit(lambda: jax.random.key(1), out_shardings=placed())(),
        "weak": jax.jit(lambda: 2.0, out_shardings=placed())(),
        "number": 3,
    }


@jax.jit
def update(state, x):
    key, noise = jax.random.split(state["key"])
    w = state["w"] * 0.5 + x + jax.random.uniform(noise, x.shape, jnp.float32)
    metrics = {"loss": x.sum(), "grad_norm": jnp.abs(x).max()}
    more = {"half": state["half"] + 1, "b": state["b"] * 1.5, "done": state["done"] + 1}
    more["weak"] = state["weak"] + 1
    return {"w": w, "key": key} | more, metrics


def step(state, x):
    kept = {name: state[name] for name in ("host", "number")}
    made, metrics = update({name: state[name] for name in state if name not in kept}, x)
    return made | kept, metrics


def batch(number: int):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    me = str(jax.process_index())
    if number == 4 and os.environ.get("FAILS") == me:
        raise ValueError("no batch here")
    if number == 4 and os.environ.get("FULL") == me:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    x = np.random.default_rng(number).integers(-9, 9, (ROWS, COLUMNS)).astype(np.float32)
    if str(number) in os.environ.get("WORSE", "").split(","):
        x[0] = np.nan
    return laid(x, placed("all"))


def digest(state) -> str:
    keys = jax.random.key_data(state["key"])
    arrays = [a for a in jax.tree.leaves(state | {"key": keys}) if isinstance(a, jax.Array)]
    whole = [np.asarray(multihost_utils.process_allgather(a, tiled=True)) for a in arrays]
    return hashlib.sha256(b"".join(a.tobytes() for a in whole)).hexdigest()


def main(out: str, steps: str, *processes: str) -> None:
    if processes:
        limits = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 10}
        meshes.join(*map(int, processes), **limits)
    folder.SHOWN = float(os.environ.get("SHOWN", folder.SHOWN))
    with jaxmem.runs.record(out, resume=True) as run:
        given = {"steps": int(steps), "run": run, "keep": 3}
        given["save_every"] = float(os.environ.get("SAVE_EVERY", "0"))
        said = lambda number, row: print("step", number, flush=True)
        state = jaxmem.runs.train(step, first, batch, **given, each=said)
        assert state["host"].sharding.memory_kind == os.environ.get("KIND", "pinned_host")
        assert state["w"].sharding.is_equivalent_to(first()["w"].sharding, 2)
        found = digest(state)
        run.summary({"config": "together", "digest": found})
    print("digest", found, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except jaxmem.runs.Interrupted as error:
        sys.exit(128 + error.number)
