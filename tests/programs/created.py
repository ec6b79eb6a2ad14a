"""Run by test_created.py on several CPU devices, of this process or of several: states that are made
a layer at a time, each device's part, beside the same states made whole and divided afterwards.

    python -m tests.programs.created AXES [PROCESS PROCESSES PORT]

AXES is "auto" or "explicit". Prints, as JSON, a row for each state: how far it is from the other,
the arrays that lie otherwise, how far one step's parameters are from the other's, and how far those
have moved.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.programs.zero3 import placed, worst
from tests.shared import tiny_lm

LAYERS = 3
HOST = {"persist": 1, "copies": 1, "outer_moments": "pinned_host"}
RESIDENT = {"persist": LAYERS}
WAYS = (
    ("adama", "states", HOST),
    ("adama", "states", RESIDENT),
    ("adama", "moments", RESIDENT),
    ("adama", "nothing", {"persist": 0}),
    ("lion", "states", HOST),
    ("slow", "states", {"persist": 0}),
)


def slow():
    """SGD, and a mean of the parameters, whose first value is theirs."""

    def update(updates, state, params):
        del params
        return updates, {**state, "count": state["count"] + 1}

    init = lambda params: {"slow": params, "count": jnp.int32(0), "ones": optax.tree.ones_like(params)}
    return optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.01))


OPTIMIZERS = {
    "adama": lambda: tiny_lm.released(jaxmem.adama(0.01, accumulation_steps=2, axis_name="data")),
    "lion": lambda: tiny_lm.released(optax.lion(0.01), axis_name="data"),
    "slow": lambda: tiny_lm.released(slow(), axis_name="data"),
}


def drawn(key, i):
    """A layer: small numbers that depend on all of its shape."""
    a, b = jax.random.split(jax.random.fold_in(key, i))
    return {
        "bias": jax.random.normal(a, (5,)) / 10,  # which no device has a part of
        "down": jax.random.normal(a, (32, 16)) / 4,
        "up": jax.random.normal(b, (16, 32)) / 4,
    }


def block(p, x, *shared):
    return tiny_lm.block({"down": p["down"], "up": p["up"]}, x, *shared) + p["bias"].sum()


def whole(mesh, step, divided, how):
    """The state that is made whole by every process, then divided, then split."""
    key = jax.random.key(3)
    layers = jax.jit(lambda: jax.vmap(lambda i: drawn(key, i))(jnp.arange(LAYERS)))()
    params = tiny_lm.parameters(np.float32, width=16, vocab=32) | {"blocks": layers}
    state = step.init(params)
    specs = step.specs(params, mesh.shape["data"], divided)
    return step.split(jax.tree.map(lambda a, s: placed(a, mesh, s), state, specs), **how)


def made(mesh, step, divided, how):
    key = jax.random.key(3)
    outer = tiny_lm.parameters(np.float32, width=16, vocab=32)
    del outer["blocks"]
    if divided == "states":  # arrays of NumPy, of this process's devices, of all devices
        outer["final"] = np.asarray(outer["final"])
        outer["scale"] = placed(outer["scale"], mesh, P())
    layer = lambda i: drawn(key, i)
    return step.create(outer, layer, LAYERS, **how, mesh=mesh, divided=divided)


def everywhere(mesh, tree):
    """NumPy's arrays of a state, whole, in every process."""
    where = jax.sharding.NamedSharding(mesh, P())
    near = jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind("device")), tree)
    whole = jax.jit(lambda tree: tree, out_shardings=where)(near)
    return jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), whole)


def main(axes: str, *processes: int):
    if processes:
        process, count, port = processes
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, process)
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axes]
    shape = (2, jax.device_count() // 2)  # over the first axis states are copied
    mesh = jax.make_mesh(shape, ("copies", "data"), axis_types=(kind, kind))
    found = []
    for name, divided, how in WAYS:
        step = OPTIMIZERS[name]()
        object.__setattr__(step.model, "block", block)
        want, got = whole(mesh, step, divided, how), made(mesh, step, divided, how)
        lies = lambda a: (a.shape, a.dtype, a.sharding.memory_kind, a.sharding)
        pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
        apart = [
            jax.tree_util.keystr(path)
            for (path, a), b in pairs
            if lies(a)[:3] != lies(b)[:3] or not a.sharding.is_equivalent_to(b.sharding, a.ndim)
        ]
        row = {"name": name, "far": worst(everywhere(mesh, got), everywhere(mesh, want))}
        first = everywhere(mesh, want)[0]
        if divided == "states" or how == RESIDENT:
            call = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
            rows = placed(tiny_lm.tokens(4 * shape[1], vocab=32).astype(jnp.int32), mesh, P("data"))
            (got, _), (want, _) = call(got, rows), call(want, rows)
            got, want = everywhere(mesh, got), everywhere(mesh, want)
            row |= {"stepped": worst(got, want), "moved": worst(got[0], first)}
        found.append(row | {"apart": apart})
    print(json.dumps({"devices": jax.device_count(), "found": found}))


if __name__ == "__main__":
    axes, *processes = sys.argv[1:]
    main(axes, *map(int, processes))
